"""Images from local files, and batches of them."""
