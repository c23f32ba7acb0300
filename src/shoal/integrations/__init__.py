"""shoal within other libraries' training loops. Each module needs the library that it is named after."""
