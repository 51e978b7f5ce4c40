"""Tracing of messages that clients send and consume: message trace, and OpenTelemetry."""
