"""The order of requests, and every decision about memory."""
