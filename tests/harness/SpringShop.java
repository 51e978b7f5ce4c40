import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.stream.Collectors;
import java.util.stream.Stream;

import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.spring.annotation.ConsumeMode;
import org.apache.rocketmq.spring.annotation.RocketMQMessageListener;
import org.apache.rocketmq.spring.annotation.RocketMQTransactionListener;
import org.apache.rocketmq.spring.core.RocketMQListener;
import org.apache.rocketmq.spring.core.RocketMQLocalRequestCallback;
import org.apache.rocketmq.spring.core.RocketMQLocalTransactionListener;
import org.apache.rocketmq.spring.core.RocketMQLocalTransactionState;
import org.apache.rocketmq.spring.core.RocketMQReplyListener;
import org.apache.rocketmq.spring.core.RocketMQTemplate;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.messaging.Message;
import org.springframework.messaging.support.MessageBuilder;

/**
 * An application of Spring Boot with RocketMQ's starter. Prints a line for each thing that happened, fields by tabs, and
 * ends when each message was consumed.
 */
@EnableAutoConfiguration
public class SpringShop {
    static final int MESSAGES = 21;
    static final Set<String> SEEN = ConcurrentHashMap.newKeySet();

    public static class Order {
        public String name;
        public int price;
    }

    @RocketMQMessageListener(topic = "s-plain", consumerGroup = "s-plain", selectorExpression = "new || late",
        delayLevelWhenNextConsume = 1)
    static class Orders implements RocketMQListener<MessageExt> {
        @Override
        public void onMessage(MessageExt message) {
            String body = new String(message.getBody());
            boolean fails = body.equals("bad") && message.getReconsumeTimes() == 0;
            say("got", "plain", text(body, message.getReconsumeTimes(), message.getTags(), message.getUserProperty("to")));
            if (fails) {
                throw new IllegalStateException("the first time");
            }
            SEEN.add(body);
        }
    }

    @RocketMQMessageListener(topic = "s-keyed", consumerGroup = "s-keyed", consumeMode = ConsumeMode.ORDERLY)
    static class Steps implements RocketMQListener<String> {
        @Override
        public void onMessage(String body) {
            got("keyed", body);
        }
    }

    @RocketMQMessageListener(topic = "s-bank", consumerGroup = "s-bank")
    static class Bookings implements RocketMQListener<Order> {
        @Override
        public void onMessage(Order order) {
            got("bank", order.name, order.price);
        }
    }

    @RocketMQMessageListener(topic = "s-asked", consumerGroup = "s-asked")
    static class Answers implements RocketMQReplyListener<String, String> {
        @Override
        public String onMessage(String question) {
            return question + " 42";
        }
    }

    @RocketMQTransactionListener
    static class Bank implements RocketMQLocalTransactionListener {
        @Override
        public RocketMQLocalTransactionState executeLocalTransaction(Message message, Object how) {
            return (RocketMQLocalTransactionState) how;
        }

        @Override
        public RocketMQLocalTransactionState checkLocalTransaction(Message message) {
            say("checked", new String((byte[]) message.getPayload()));
            return RocketMQLocalTransactionState.COMMIT;
        }
    }

    /** Its argument: where the name server is. */
    public static void main(String[] arguments) {
        try {
            play(arguments[0]);
            Runtime.getRuntime().halt(0);
        } catch (Throwable error) {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    static void play(String namesrv) throws Exception {
        SpringApplication application = new SpringApplication(SpringShop.class, Orders.class, Steps.class, Bookings.class,
            Answers.class, Bank.class);
        application.setDefaultProperties(Map.of("rocketmq.name-server", namesrv, "rocketmq.producer.group", "s-shop",
            "rocketmq.producer.send-message-timeout", "30000", "spring.main.banner-mode", "off", "logging.level.root", "error"));
        send(application.run().getBean(RocketMQTemplate.class));
        for (int attempt = 0; SEEN.size() < MESSAGES && attempt < 3_000; attempt++) {
            Thread.sleep(20);
        }
        say("done");
    }

    static void send(RocketMQTemplate template) {
        template.syncSend("s-plain:new", MessageBuilder.withPayload("one").setHeader("to", "größe").build());
        template.convertAndSend("s-plain:old", "not for us");
        template.syncSend("s-plain:new", List.of(MessageBuilder.withPayload("first").build(), MessageBuilder.withPayload("second").build()));
        template.syncSend("s-plain:late", MessageBuilder.withPayload("level").build(), 30_000, 1);
        template.syncSendDelayTimeMills("s-plain:late", "time", 1_000);
        template.sendOneWay("s-plain:new", "bad");
        for (int number = 0; number < 12; number++) {
            template.syncSendOrderly("s-keyed", "" + number, "key " + number % 2);
        }
        for (RocketMQLocalTransactionState how : RocketMQLocalTransactionState.values()) {
            Order order = new Order();
            order.name = how.name();
            order.price = 7;
            Message<Order> booking = MessageBuilder.withPayload(order).setHeader("CHECK_IMMUNITY_TIME_IN_SECONDS", "1").build();
            template.sendMessageInTransaction("s-bank", booking, how);
        }
        // Clients 5.3.2 and 5.3.3 wait for replies by callbacks only, also at RocketMQ.
        template.sendAndReceive("s-asked", "how much?", new RocketMQLocalRequestCallback<String>() {
            @Override
            public void onSuccess(String reply) {
                say("reply", reply);
                SEEN.add(reply);
            }

            @Override
            public void onException(Throwable error) {
                say("failed", error);
            }
        }, 30_000);
    }

    /** Prints a message before the program counts it: the program ends with the last one. */
    static void got(String listener, Object... fields) {
        say("got", listener, text(fields));
        SEEN.add(String.valueOf(fields[0]));
    }

    static synchronized void say(Object... fields) {
        System.out.println(text(fields));
    }

    static String text(Object... fields) {
        return Stream.of(fields).map(String::valueOf).collect(Collectors.joining("\t"));
    }
}
