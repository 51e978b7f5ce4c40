"""What clients tell of the messages they send and consume: message trace, and OpenTelemetry."""
