"""The arena of slots and pages, its bytes, and where both go when they leave the device."""
