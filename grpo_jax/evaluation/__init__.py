"""What trained policies do: whole episodes, answers to problems, texts."""
