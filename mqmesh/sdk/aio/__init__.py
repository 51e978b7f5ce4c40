"""The clients of asyncio."""
