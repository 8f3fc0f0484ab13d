"""The process that holds the target and decides which draft tokens become text."""
