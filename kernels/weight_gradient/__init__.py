"""The gradient of a weight from the encoded input of its product."""
