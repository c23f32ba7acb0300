"""Where values lie that a device has no room for: on the CPU, in files, on other ranks."""
