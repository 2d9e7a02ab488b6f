"""Environments of other libraries, each played by its library's rules. Only the interpreter of the processes needs the library."""
