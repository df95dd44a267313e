"""What is kept on disk, and what is shown meanwhile."""
