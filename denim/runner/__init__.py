"""One step on the device."""
