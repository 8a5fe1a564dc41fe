"""A projection of an array, encoded before it reaches memory."""
