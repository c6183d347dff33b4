"""The program beside the harness: joins, relays model traffic, supervises, verifies and reports.

It is packed as one zipapp (``pack.py``), the same for the local backend and for pods, uses only the standard
library and imports nothing of the rest of forge-server. Start-up cost matters (every attempt pays it), so it
does without asyncio, ssl, urllib, subprocess and shutil.
"""
