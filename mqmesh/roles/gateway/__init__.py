"""The gateway: RocketMQ's own clients speak to mqmesh; see docs/gateway.md."""
