"""The gateway's side of RocketMQ 5's gRPC protocol, ``apache.rocketmq.v2.MessagingService``."""
