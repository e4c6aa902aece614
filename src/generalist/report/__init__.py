"""The report: one page about one run or many, and its figures as files for a paper."""

from generalist.report.page import Written, write_report

__all__ = ["Written", "write_report"]
