"""One module per family of requests; each handler is `(context, request) -> reply`."""
