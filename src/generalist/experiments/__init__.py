"""Small experiments whose output the documents quote; each is a module that runs by itself."""
