import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/** An unchanged client of RocketMQ. Prints a line for each thing that happened, fields by tabs. */
public class GatewayClient {
    static String namesrv;

    public static void main(String[] arguments) throws Exception {
        namesrv = arguments[0];
        switch (arguments[1]) {
            case "send" -> send(arguments[2]);
            case "transact" -> transact(arguments[2]);
            case "request" -> request(arguments[2]);
            case "try" -> tryToSend(arguments[2]);
            case "consume" -> consume(arguments[2], arguments[3], arguments[4]);
            default -> throw new IllegalArgumentException(arguments[1]);
        }
        System.exit(0);
    }

    /** What signs requests; null without an access key. */
    static RPCHook hook() {
        String key = System.getProperty("access.key");
        return key == null ? null : new AclClientRPCHook(new SessionCredentials(key, System.getProperty("secret.key")));
    }

    static DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group, hook());
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        return producer;
    }

    static synchronized void say(Object... fields) {
        List<String> texts = new ArrayList<>();
        for (Object field : fields) {
            texts.add(String.valueOf(field));
        }
        System.out.println(String.join("\t", texts));
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static void sent(SendResult result) {
        say("sent", result.getSendStatus(), result.getMsgId(), result.getOffsetMsgId());
    }

    /** All kinds of sends. */
    static void send(String topic) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java-producer");
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(30_000);
        producer.setCompressMsgBodyOverHowmuch(1_000);
        producer.start();
        Message message = new Message(topic, "new", "k1 k2", bytes("sync"));
        message.putUserProperty("to", "größe");
        message.setFlag(5);
        sent(producer.send(message));
        sent(producer.send(new Message(topic, bytes("x".repeat(5_000)))));
        sent(producer.send(List.of(new Message(topic, bytes("batch 1")), new Message(topic, bytes("batch 2")))));
        Message late = new Message(topic, bytes("late"));
        late.setDelayTimeLevel(1);
        sent(producer.send(late));
        recall(producer, topic);
        CountDownLatch done = new CountDownLatch(20);
        for (int number = 0; number < 20; number++) {
            producer.send(new Message(topic, bytes("async " + number)), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    sent(result);
                    done.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    say("failed", error);
                    done.countDown();
                }
            });
        }
        done.await(30, TimeUnit.SECONDS);
        long now = System.currentTimeMillis();
        say("found", find(() -> producer.queryMessage(topic, "k2", 32, 0, now + 60_000).getMessageList().size()));
        producer.sendOneway(new Message(topic, "bad", bytes("oneway")));
        try {
            producer.send(new Message("%RETRY%somebody", bytes("x")), 3_000);
            say("failed", "a reserved topic was taken");
        } catch (Exception error) {
            say("refused", error.getClass().getSimpleName());
        }
        producer.shutdown();
    }

    /** Calls a delayed message back, where the client knows how to. */
    static void recall(DefaultMQProducer producer, String topic) throws Exception {
        Message message = new Message(topic, bytes("recalled"));
        try {
            Method handleOf = SendResult.class.getMethod("getRecallHandle");
            Message.class.getMethod("setDelayTimeMs", long.class).invoke(message, 60_000);
            SendResult result = producer.send(message);
            Method recall = DefaultMQProducer.class.getMethod("recallMessage", String.class, String.class);
            say("recalled", recall.invoke(producer, topic, handleOf.invoke(result)).equals(result.getMsgId()));
        } catch (NoSuchMethodException error) {
            say("recalled", "by 5.x only");
        }
    }

    /** Sends a message each, and says what became of it: topic, access key and secret key, or the topic alone. */
    static void tryToSend(String tries) throws Exception {
        for (String one : tries.split(";")) {
            String[] fields = one.split(",");
            RPCHook hook = fields.length == 1 ? null : new AclClientRPCHook(new SessionCredentials(fields[1], fields[2]));
            DefaultMQProducer producer = new DefaultMQProducer("java-tries", hook);
            producer.setNamesrvAddr(namesrv);
            producer.setInstanceName(one);
            producer.setRetryTimesWhenSendFailed(0);
            producer.start();
            try {
                sent(producer.send(new Message(fields[0], bytes("tried")), 10_000));
            } catch (Exception error) {
                Throwable why = error.getCause() == null ? error : error.getCause();
                say("refused", String.valueOf(why.getMessage()).replace('\n', ' '));
            }
            producer.shutdown();
        }
    }

    /** Asks, and waits for the reply: with a callback, for client 5.3.3 does not wait otherwise. */
    static void request(String topic) throws Exception {
        DefaultMQProducer producer = producer("java-asks");
        CountDownLatch done = new CountDownLatch(1);
        producer.request(new Message(topic, bytes("how much?")), new RequestCallback() {
            @Override
            public void onSuccess(Message reply) {
                say("reply", new String(reply.getBody(), StandardCharsets.UTF_8), reply.getProperty("from"));
                done.countDown();
            }

            @Override
            public void onException(Throwable error) {
                say("failed", error);
                done.countDown();
            }
        }, 30_000);
        done.await(40, TimeUnit.SECONDS);
        producer.shutdown();
    }

    /** The number of messages that a query finds, which waits for the index. */
    static int find(Callable<Integer> query) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
                return query.call();
            } catch (Exception error) {
                if (attempt == 200) {
                    throw error;
                }
                Thread.sleep(500);
            }
        }
    }

    /** Transactions: one is committed, one rolled back, and of one the producer knows only when it is asked. */
    static void transact(String topic) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("java-bank");
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(30_000);
        CountDownLatch asked = new CountDownLatch(1);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                say("asked", new String(message.getBody(), StandardCharsets.UTF_8), message.getTopic(), message.getTransactionId());
                asked.countDown();
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        for (LocalTransactionState state : LocalTransactionState.values()) {
            Message message = new Message(topic, bytes(state.name()));
            message.putUserProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", "1");
            say("sent", producer.sendMessageInTransaction(message, state).getTransactionId());
        }
        asked.await(90, TimeUnit.SECONDS);
        Thread.sleep(500); // the answer is one-way
        producer.shutdown();
    }

    /** Consumes until standard input ends. Whatever has the tag "bad" fails the first time. */
    static void consume(String topic, String group, String mode) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, hook(), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        Map<String, Integer> seen = new ConcurrentHashMap<>();
        if (mode.equals("replying")) {
            DefaultMQProducer producer = producer("java-replies");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                for (MessageExt one : messages) {
                    got(one);
                    try {
                        Message reply = MessageUtil.createReplyMessage(one, bytes("42"));
                        reply.putUserProperty("from", "java");
                        producer.send(reply, 10_000);
                    } catch (Exception error) {
                        say("failed", error);
                    }
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        } else if (mode.equals("orderly")) {
            consumer.setMaxReconsumeTimes(2);
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                for (MessageExt one : messages) {
                    got(one);
                    if ("poison".equals(one.getTags())) {
                        context.setSuspendCurrentQueueTimeMillis(100);
                        return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                    }
                    if ("bad".equals(one.getTags()) && seen.merge(one.getMsgId(), 1, Integer::sum) == 1) {
                        context.setSuspendCurrentQueueTimeMillis(100);
                        return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                    }
                }
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                for (MessageExt one : messages) {
                    got(one);
                    if ("bad".equals(one.getTags()) && one.getReconsumeTimes() == 0) {
                        context.setDelayLevelWhenNextConsume(1);
                        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                    }
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
        say("started");
        DefaultMQPushConsumer second = null;
        if (mode.equals("streaming")) {
            // A second member of the group.
            second = new DefaultMQPushConsumer(group, hook(), new AllocateMessageQueueAveragely());
            second.setNamesrvAddr(namesrv);
            second.setInstanceName("second");
            second.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            second.subscribe(topic, "*");
            second.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(one -> got(one, "second"));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            second.start();
            Thread sends = new Thread(() -> stream(topic));
            sends.setDaemon(true);
            sends.start();
        }
        while (System.in.read() >= 0) {
            // Whoever started this ends it so.
        }
        consumer.shutdown();
        if (second != null) {
            second.shutdown();
        }
        say("ended");
    }

    /** Sends message after message, and says which of them were stored. */
    static void stream(String topic) {
        try {
            DefaultMQProducer producer = producer("java-streams");
            for (int number = 0; ; number++) {
                try {
                    producer.send(new Message(topic, bytes("java " + number)), 3_000);
                    say("stored", "java " + number);
                } catch (Exception error) {
                    // It may be stored, or not: nobody counts on it.
                }
                Thread.sleep(20);
            }
        } catch (Exception error) {
            say("failed", error);
        }
    }

    static void got(MessageExt one) {
        got(one, "first");
    }

    static void got(MessageExt one, String member) {
        say("got", new String(one.getBody(), StandardCharsets.UTF_8), one.getTags(), one.getKeys(), one.getUserProperty("to"),
            one.getFlag(), one.getReconsumeTimes(), one.getTopic(), one.getQueueId(), member);
    }
}
