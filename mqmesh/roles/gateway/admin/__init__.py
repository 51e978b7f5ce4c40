"""Jobs of administrators who use RocketMQ's tools: mqadmin, its dashboard and exporters."""
