"""What a user types, each `grpo-jax NAME`: parse, call the library, print, plot."""
