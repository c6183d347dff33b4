"""What the demo runs in another process's environment (torch, transformers): it imports nothing of the
server.
"""
