"""What is to be solved: problems, their data and their tilts."""
