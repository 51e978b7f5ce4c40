import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.BooleanSupplier;

import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** An unchanged client of RocketMQ 5 by gRPC. Prints a line for each thing, fields by tabs. */
public class GrpcClient {
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    static final Map<String, Integer> SEEN = new ConcurrentHashMap<>();
    static String endpoints;

    public static void main(String[] arguments) {
        endpoints = arguments[0];
        try {
            all(arguments[1]);
            say("done");
            while (System.in.read() >= 0) {
                // Consumers are there until standard input ends.
            }
            Runtime.getRuntime().halt(0);  // push consumers would wait for their last receives
        } catch (Throwable error) {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    /** A producer speaks TLS, consumers plain text: both at one port. */
    static ClientConfiguration configuration(boolean ssl) {
        return ClientConfiguration.newBuilder().setEndpoints(endpoints).enableSsl(ssl)
            .setRequestTimeout(Duration.ofSeconds(10)).build();
    }

    /** Topics plain, keyed and bank; groups push, fifo and simple: each behind a prefix. */
    static void all(String prefix) throws Exception {
        String plain = prefix + "-plain", keyed = prefix + "-keyed", bank = prefix + "-bank";
        Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(true))
            .setTopics(plain, keyed, bank)
            .setTransactionChecker(message -> {
                say("checked", text(message), message.getTopic());
                return TransactionResolution.COMMIT;
            }).build();
        push(prefix + "-push", plain, new FilterExpression("new || late"));
        push(prefix + "-fifo", keyed, new FilterExpression());
        push(prefix + "-audit", bank, new FilterExpression());
        long begun = System.currentTimeMillis();
        SendReceipt first = producer.send(message(plain, "one").setTag("new").setKeys("k1", "k2")
            .addProperty("to", "größe").addProperty("price", "7").build());
        say("sent", first.getMessageId());
        producer.send(message(plain, "x".repeat(100_000)).setTag("new").build());
        producer.send(message(plain, "bad").setTag("new").addProperty("price", "3").build());
        producer.send(message(plain, "other").setTag("old").addProperty("price", "9").build());
        producer.send(message(plain, "later").setTag("late").setDeliveryTimestamp(begun + 2_000).build());
        Message gone = message(plain, "recalled").setTag("late").setDeliveryTimestamp(begun + 3_000).build();
        say("recalled", producer.recallMessage(plain, producer.send(gone).getRecallHandle()));
        for (int number = 0; number < 20; number++) {
            producer.send(message(keyed, "" + number).setMessageGroup("g" + number % 3).build());
        }
        for (String how : List.of("commit", "rollback", "unknown")) {
            Transaction transaction = producer.beginTransaction();
            producer.send(message(bank, how).build(), transaction);
            if (how.equals("commit")) {
                transaction.commit();
            } else if (how.equals("rollback")) {
                transaction.rollback();
            }
        }
        try {
            producer.send(message(prefix + "-unknown", "lost").build());
            say("sent to an unknown topic");
        } catch (ClientException error) {
            say("refused", error.getClass().getSimpleName());
        }
        receive(prefix + "-simple", plain);
        await(() -> SEEN.size() == 26 && SEEN.get("bad") == 2 && SEEN.get("5") == 2);
    }

    static void await(BooleanSupplier condition) throws Exception {
        long until = System.currentTimeMillis() + 60_000;
        while (!condition.getAsBoolean() && System.currentTimeMillis() < until) {
            Thread.sleep(20);
        }
    }

    /** A push consumer, to which "bad" and "5" fail once. */
    static void push(String group, String topic, FilterExpression filter) throws Exception {
        PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration(false))
            .setConsumerGroup(group).setSubscriptionExpressions(Map.of(topic, filter))
            .setMessageListener(message -> {
                String body = text(message);
                boolean fails = !SEEN.containsKey(body) && (body.equals("bad") || body.equals("5"));
                got(group, message);  // printed before it counts: the program ends with the last one
                SEEN.merge(body, 1, Integer::sum);
                return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }).build();
    }

    /** A simple consumer of what costs 5 or more: the first message comes a second time. */
    static void receive(String group, String topic) throws Exception {
        FilterExpression dear = new FilterExpression("price >= 5", FilterExpressionType.SQL92);
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration(false)).setConsumerGroup(group)
            .setAwaitDuration(Duration.ofSeconds(5)).setSubscriptionExpressions(Map.of(topic, dear)).build()) {
            int acked = 0;
            while (acked < 2) {
                for (MessageView message : consumer.receive(16, Duration.ofSeconds(20))) {
                    got(group, message);
                    if (message.getDeliveryAttempt() == 1 && text(message).equals("one")) {
                        consumer.changeInvisibleDuration(message, Duration.ofSeconds(1));
                    } else {
                        consumer.ack(message);
                        acked++;
                    }
                }
            }
        }
    }

    static synchronized void say(Object... fields) {
        List<String> texts = new ArrayList<>();
        for (Object field : fields) {
            texts.add(String.valueOf(field));
        }
        System.out.println(String.join("\t", texts));
    }

    static void got(String group, MessageView message) {
        say("got", group, text(message).substring(0, Math.min(text(message).length(), 20)), message.getDeliveryAttempt(), message.getTag().orElse(""),
            String.join(" ", message.getKeys()), message.getProperties().get("to"),
            message.getMessageGroup().orElse(""), message.getMessageId());
    }

    static MessageBuilder message(String topic, String body) {
        return PROVIDER.newMessageBuilder().setTopic(topic).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    static String text(MessageView message) {
        ByteBuffer body = message.getBody();
        byte[] bytes = new byte[body.remaining()];
        body.get(bytes);
        return new String(bytes, StandardCharsets.UTF_8);
    }
}
