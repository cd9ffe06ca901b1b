"""What several studies share."""
