"""Batches: files of requests, answered at the server's leisure or by `octavo run-batch`."""
