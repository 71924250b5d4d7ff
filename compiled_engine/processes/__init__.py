"""The engine core behind a socket: its process or thread, the messages, and the caller's end."""
