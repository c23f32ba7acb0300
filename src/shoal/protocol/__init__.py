"""What goes over the wire: the messages with their bounds, and the keys that sign them."""
