"""The dashboard in the terminal. It knows the server by its public HTTP API alone (``forge_server.client``).

One thread reads the event stream, a few threads ask; the loop only paints. What is painted is plain lines
(``ink``) in two widgets (``sheet``, ``grid``) that repaint the lines that changed and no others.
"""
