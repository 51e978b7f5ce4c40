import java.io.ByteArrayOutputStream;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.serializer.SerializerFeature;
import org.apache.commons.cli.DefaultParser;
import org.apache.commons.cli.Options;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.srvutil.ServerUtil;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import org.apache.rocketmq.tools.command.SubCommand;

/**
 * Does the same by the Java client at each RocketMQ that it is given, and prints what it saw: a name, a tab, and an
 * object in JSON. All scenes run at the same time, each with topics and groups of its own.
 */
public class OracleClient {
    static String namesrv;
    static DefaultMQAdminExt admin;
    static DefaultMQProducer producer;
    static String broker;
    static PrintStream out;

    interface Scene {
        void play() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        namesrv = arguments[0];
        out = System.out;
        System.setProperty("rocketmq.client.rebalance.waitInterval", "500");
        System.setProperty("rocketmq.namesrv.addr", namesrv); // for mqadmin
        admin = new DefaultMQAdminExt(20_000L);
        admin.setNamesrvAddr(namesrv);
        admin.start();
        broker = admin.examineBrokerClusterInfo().getBrokerAddrTable().values().iterator().next().selectBrokerAddr();
        producer = start(new DefaultMQProducer("oj-producer"));
        Map<String, Scene> scenes = new TreeMap<>();
        scenes.put("sends", OracleClient::sends);
        scenes.put("bad", OracleClient::bad);
        scenes.put("retries", OracleClient::retries);
        scenes.put("ordered", OracleClient::ordered);
        scenes.put("filters", OracleClient::filters);
        scenes.put("delays", OracleClient::delays);
        scenes.put("transactions", OracleClient::transactions);
        scenes.put("replies", OracleClient::replies);
        scenes.put("lite", OracleClient::lite);
        scenes.put("pulls", OracleClient::pulls);
        scenes.put("queries", OracleClient::queries);
        scenes.put("broadcast", OracleClient::broadcast);
        Set<String> wanted = new HashSet<>(Arrays.asList(arguments).subList(1, arguments.length));
        ExecutorService pool = Executors.newCachedThreadPool();
        Map<String, Future<?>> running = new TreeMap<>();
        for (Map.Entry<String, Scene> one : scenes.entrySet()) {
            if (wanted.isEmpty() || wanted.contains(one.getKey())) {
                running.put(one.getKey(), pool.submit(() -> {
                    long begun = System.currentTimeMillis();
                    one.getValue().play();
                    System.err.println(one.getKey() + " " + (System.currentTimeMillis() - begun) + " ms");
                    return null;
                }));
            }
        }
        boolean failed = false;
        for (Map.Entry<String, Future<?>> one : running.entrySet()) {
            try {
                one.getValue().get(90, TimeUnit.SECONDS);
            } catch (Exception error) {
                failed = true;
                System.err.println("scene " + one.getKey() + " failed");
                error.printStackTrace();
            }
        }
        if (wanted.isEmpty() || wanted.contains("mqadmin")) {
            long begun = System.currentTimeMillis();
            commands();
            System.err.println("mqadmin " + (System.currentTimeMillis() - begun) + " ms");
        }
        out.flush();
        Runtime.getRuntime().halt(failed ? 1 : 0);
    }

    // ---- Steps ---------------------------------------------------------------------------

    static <T extends DefaultMQProducer> T start(T one) throws Exception {
        one.setNamesrvAddr(namesrv);
        one.setSendMsgTimeout(20_000);
        one.setRetryTimesWhenSendFailed(0);
        one.start();
        return one;
    }

    static DefaultMQPushConsumer consumer(String group) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setPollNameServerInterval(1_000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    static void topic(String name, int queues) throws Exception {
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(name, queues, queues));
        until(() -> {
            try {
                return producer.fetchPublishMessageQueues(name).size() == queues;
            } catch (MQClientException error) {
                return false;
            }
        });
    }

    static void until(Callable<Boolean> look) throws Exception {
        for (int attempt = 0; attempt < 3_000; attempt++) {
            if (look.call()) {
                return;
            }
            Thread.sleep(20);
        }
        throw new IllegalStateException("not within a minute");
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static MessageQueue queue(String topic, int number) throws Exception {
        for (MessageQueue one : producer.fetchPublishMessageQueues(topic)) {
            if (one.getQueueId() == number) {
                return one;
            }
        }
        throw new IllegalStateException("no queue " + number + " of " + topic);
    }

    static synchronized void note(String name, Object... pairs) {
        Map<String, Object> found = new TreeMap<>();
        for (int at = 0; at < pairs.length; at += 2) {
            found.put((String) pairs[at], pairs[at + 1]);
        }
        out.println(name + "\t" + JSON.toJSONString(found, SerializerFeature.MapSortField, SerializerFeature.WriteMapNullValue));
    }

    static void sent(String name, SendResult result) {
        note(name, "status", result.getSendStatus().name(), "msgId", result.getMsgId(), "offsetMsgId", result.getOffsetMsgId(),
            "queueId", result.getMessageQueue().getQueueId(), "broker", result.getMessageQueue().getBrokerName(),
            "queueOffset", result.getQueueOffset(), "transactionId", result.getTransactionId(),
            "regionId", result.getRegionId(), "traceOn", result.isTraceOn());
    }

    static void got(String name, MessageExt one) {
        note(name, shown(one));
    }

    /** Its properties without those that the client adds, or that differ with the time of a check-back. */
    static Map<String, String> properties(Message one) {
        Map<String, String> found = new TreeMap<>(one.getProperties());
        found.keySet().removeAll(Set.of("MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME", "WAIT", "TRANSACTION_CHECK_TIMES",
            "TRAN_PREPARED_QUEUE_OFFSET"));
        return found;
    }

    static Object[] shown(MessageExt one) {
        return new Object[] {
            "body", new String(one.getBody(), StandardCharsets.UTF_8), "topic", one.getTopic(), "tags", one.getTags(), "keys", one.getKeys(),
            "flag", one.getFlag(), "msgId", one.getMsgId(), "queueId", one.getQueueId(), "queueOffset", one.getQueueOffset(),
            "reconsumeTimes", one.getReconsumeTimes(), "sysFlag", one.getSysFlag(), "delayTimeLevel", one.getDelayTimeLevel(),
            "hasHalf", one.getPreparedTransactionOffset() > 0, "transactionId", one.getTransactionId(),
            "brokerName", one.getBrokerName(), "storeHost", String.valueOf(one.getStoreHost()),
            "properties", properties(one)};
    }

    static void refused(String name, Callable<?> call) {
        try {
            Object found = call.call();
            note(name, "outcome", "no error", "result", found == null ? null : found.getClass().getSimpleName());
        } catch (MQBrokerException error) {
            note(name, "outcome", "MQBrokerException", "code", error.getResponseCode());
        } catch (MQClientException error) {
            note(name, "outcome", "MQClientException", "code", error.getResponseCode());
        } catch (Exception error) {
            note(name, "outcome", error.getClass().getSimpleName());
        }
    }

    // ---- Scenes --------------------------------------------------------------------------

    static void sends() throws Exception {
        topic("oj-sends", 4);
        Message full = new Message("oj-sends", "tag", "k1 k2", bytes("full"));
        full.putUserProperty("own", "größe");
        full.setFlag(7);
        sent("sends: to a queue", producer.send(full, queue("oj-sends", 1)));
        sent("sends: by a selector", producer.send(new Message("oj-sends", bytes("chosen")), (queues, message, argument) -> queues.get((int) argument), 2));
        List<Message> batch = List.of(new Message("oj-sends", bytes("b1")), new Message("oj-sends", "t", "k3", bytes("b2")));
        sent("sends: a batch", producer.send(batch, queue("oj-sends", 3)));
        BlockingQueue<SendResult> results = new LinkedBlockingQueue<>();
        producer.send(new Message("oj-sends", bytes("async")), queue("oj-sends", 1), new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                results.add(result);
            }

            @Override
            public void onException(Throwable error) {
                note("sends: async failed", "error", String.valueOf(error));
            }
        });
        sent("sends: async", results.poll(30, TimeUnit.SECONDS));
        producer.sendOneway(new Message("oj-sends", bytes("oneway")), queue("oj-sends", 1));
        Message large = new Message("oj-sends", bytes("x".repeat(10_000)));
        sent("sends: compressed", producer.send(large, queue("oj-sends", 2)));
        Map<String, MessageExt> got = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = consumer("oj-sends-g");
        consumer.subscribe("oj-sends", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt one : messages) {
                got.put(new String(one.getBody(), StandardCharsets.UTF_8).substring(0, 2), one);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        until(() -> got.size() == 7);
        for (String name : new String[] {"fu", "ch", "b1", "b2", "as", "on", "xx"}) {
            MessageExt one = got.get(name);
            if (name.equals("xx")) {
                note("sends: got xx", "bytes", one.getBody().length, "sysFlag", one.getSysFlag(), "properties", properties(one));
            } else {
                got("sends: got " + name, one);
            }
        }
        consumer.shutdown();
    }

    static void bad() throws Exception {
        admin.createAndUpdateTopicConfig(broker, new TopicConfig("oj-read-only", 1, 1, 4));
        topic("oj-bad", 1);
        refused("bad: an illegal topic", () -> producer.send(new Message("a b", bytes("x"))));
        refused("bad: no body", () -> producer.send(new Message("oj-bad", new byte[0])));
        refused("bad: too large", () -> producer.send(new Message("oj-bad", new byte[(4 << 20) + 1])));
        Message many = new Message("oj-bad", bytes("x"));
        many.putUserProperty("p", "x".repeat(33_000));
        refused("bad: too many properties", () -> producer.send(many));
        Message queueless = new Message("oj-bad", bytes("x"));
        refused("bad: no such queue", () -> producer.send(queueless, new MessageQueue("oj-bad", queue("oj-bad", 0).getBrokerName(), 9)));
        refused("bad: read only", () -> producer.send(new Message("oj-read-only", bytes("x")), new MessageQueue("oj-read-only", queue("oj-bad", 0).getBrokerName(), 0)));
        refused("bad: a system topic", () -> producer.send(new Message("SCHEDULE_TOPIC_XXXX", bytes("x"))));
        Message late = new Message("oj-bad", bytes("x"));
        late.setDelayTimeLevel(99);
        refused("bad: delay level 99", () -> producer.send(late));
        refused("bad: offsets of an unknown topic", () -> producer.maxOffset(new MessageQueue("oj-nowhere", queue("oj-bad", 0).getBrokerName(), 0)));
        refused("bad: an unknown key", () -> producer.queryMessage("oj-bad", "nothing", 1, 0, Long.MAX_VALUE));
        refused("bad: an unknown id", () -> producer.viewMessage("oj-bad", "7F0000010000000000000000000000FF"));
        refused("bad: an id that is none", () -> producer.viewMessage("oj-bad", "nothing"));
        refused("bad: delay and batch", () -> producer.send(List.of(late, new Message("oj-bad", bytes("y")))));
    }

    static void retries() throws Exception {
        topic("oj-retries", 1);
        Message bad = new Message("oj-retries", "bad", "k1", bytes("bad"));
        bad.putUserProperty("own", "1");
        producer.send(bad);
        List<MessageExt> got = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = consumer("oj-retries-g");
        consumer.setMaxReconsumeTimes(2);
        consumer.subscribe("oj-retries", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            got.addAll(messages);
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        until(() -> got.size() == 3);
        for (int attempt = 0; attempt < 3; attempt++) {
            got("retries: attempt " + attempt, got.get(attempt));
        }
        dead("retries", "oj-retries-g");
        consumer.shutdown();
    }

    /** The dead letter of a group that has one. */
    static void dead(String scene, String group) throws Exception {
        String topic = "%DLQ%" + group;
        until(() -> {
            try {
                return admin.maxOffset(new MessageQueue(topic, queue("oj-" + scene, 0).getBrokerName(), 0)) == 1;
            } catch (MQClientException error) {
                return false;
            }
        });
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(topic, 1, 1));
        DefaultMQPullConsumer reader = new DefaultMQPullConsumer(group + "-dead");
        reader.setNamesrvAddr(namesrv);
        reader.start();
        MessageQueue queue = new MessageQueue(topic, queue("oj-" + scene, 0).getBrokerName(), 0);
        PullResult[] found = new PullResult[1];
        until(() -> {
            found[0] = reader.pull(queue, "*", 0, 1);
            return found[0].getMsgFoundList() != null;
        });
        got(scene + ": dead letter", found[0].getMsgFoundList().get(0));
        reader.shutdown();
    }

    static void ordered() throws Exception {
        topic("oj-ordered", 2);
        for (int number = 0; number < 12; number++) {
            Message one = new Message("oj-ordered", number == 4 ? "again" : number == 6 ? "poison" : "good", bytes("" + number));
            producer.send(one, queue("oj-ordered", number % 2));
        }
        Map<Integer, List<String>> got = new ConcurrentHashMap<>();
        List<MessageExt> poisoned = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = consumer("oj-ordered-g");
        consumer.setMaxReconsumeTimes(2);
        consumer.setSuspendCurrentQueueTimeMillis(100);
        consumer.subscribe("oj-ordered", "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            MessageExt one = messages.get(0);
            context.setSuspendCurrentQueueTimeMillis(100);
            List<String> ofQueue = got.computeIfAbsent(one.getQueueId(), key -> Collections.synchronizedList(new ArrayList<>()));
            ofQueue.add(new String(one.getBody(), StandardCharsets.UTF_8) + "/" + one.getReconsumeTimes());
            if ("poison".equals(one.getTags())) {
                poisoned.add(one);
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            }
            boolean again = "again".equals(one.getTags()) && one.getReconsumeTimes() == 0;
            return again ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        until(() -> got.values().stream().mapToInt(List::size).sum() == 15);
        note("ordered: queues", "0", got.get(0), "1", got.get(1));
        dead("ordered", "oj-ordered-g");
        consumer.shutdown();
    }

    static void filters() throws Exception {
        topic("oj-filters", 1);
        for (int number = 0; number < 8; number++) {
            Message one = new Message("oj-filters", number % 2 == 0 ? "a" : "b", bytes("" + number));
            one.putUserProperty("n", "" + number);
            one.putUserProperty("region", number < 4 ? "EU" : "US");
            producer.send(one);
        }
        Map<String, MessageSelector> selectors = new TreeMap<>();
        selectors.put("tag", MessageSelector.byTag("a"));
        selectors.put("tags", MessageSelector.byTag("a || c"));
        selectors.put("sql", MessageSelector.bySql("n BETWEEN 2 AND 5 AND region = 'EU'"));
        selectors.put("sql-tag", MessageSelector.bySql("TAGS IN ('b') AND n > 3"));
        selectors.put("sql-null", MessageSelector.bySql("missing IS NULL AND n <> 0"));
        selectors.put("sql-like", MessageSelector.bySql("NOT (n >= 3) OR region = 'XX'"));
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        Map<String, List<String>> got = new ConcurrentHashMap<>();
        for (Map.Entry<String, MessageSelector> one : selectors.entrySet()) {
            List<String> bodies = Collections.synchronizedList(new ArrayList<>());
            got.put(one.getKey(), bodies);
            DefaultMQPushConsumer consumer = consumer("oj-filters-" + one.getKey());
            consumer.subscribe("oj-filters", one.getValue());
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(message -> bodies.add(new String(message.getBody(), StandardCharsets.UTF_8)));
                return ConsumeOrderlyStatus.SUCCESS;
            });
            consumer.start();
            consumers.add(consumer);
        }
        until(() -> got.get("tag").size() >= 4 && got.get("sql").size() >= 2 && got.get("sql-tag").size() >= 2
            && got.get("sql-null").size() >= 7 && got.get("sql-like").size() >= 3 && got.get("tags").size() >= 4);
        for (Map.Entry<String, List<String>> one : got.entrySet()) {
            note("filters: " + one.getKey(), "bodies", new ArrayList<>(one.getValue()));
        }
        for (DefaultMQPushConsumer one : consumers) {
            one.shutdown();
        }
    }

    static void delays() throws Exception {
        topic("oj-delays", 1);
        DefaultMQPushConsumer consumer = consumer("oj-delays-g");
        Map<String, Long> sentAt = new ConcurrentHashMap<>(), gotAt = new ConcurrentHashMap<>();
        Map<String, MessageExt> got = new ConcurrentHashMap<>();
        consumer.subscribe("oj-delays", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt one : messages) {
                String body = new String(one.getBody(), StandardCharsets.UTF_8);
                gotAt.put(body, System.currentTimeMillis());
                got.put(body, one);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        for (String name : new String[] {"level", "ms", "sec", "deliver", "none"}) {
            Message one = new Message("oj-delays", "tag", "k", bytes(name));
            sentAt.put(name, System.currentTimeMillis());
            switch (name) {
                case "level" -> one.setDelayTimeLevel(2);
                case "ms" -> one.setDelayTimeMs(2_000);
                case "sec" -> one.setDelayTimeSec(2);
                case "deliver" -> one.setDeliverTimeMs(System.currentTimeMillis() + 2_000);
                default -> { }
            }
            SendResult result = producer.send(one);
            if (!name.equals("none")) {
                note("delays: sent " + name, "status", result.getSendStatus().name(), "offsetMsgId", result.getOffsetMsgId());
            }
        }
        until(() -> got.size() == 5);
        for (String name : got.keySet()) {
            MessageExt one = got.get(name);
            long waited = gotAt.get(name) - sentAt.get(name), wanted = name.equals("level") ? 5_000 : name.equals("none") ? 0 : 2_000;
            note("delays: got " + name, "inTime", waited >= wanted - 200 && waited < wanted + 15_000, "delayTimeLevel", one.getDelayTimeLevel(),
                "topic", one.getTopic(), "tags", one.getTags(), "keys", one.getKeys(), "properties", properties(one));
        }
        consumer.shutdown();
    }

    static void transactions() throws Exception {
        topic("oj-bank", 1);
        TransactionMQProducer bank = new TransactionMQProducer("oj-bank-p");
        bank.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String name = new String(message.getBody(), StandardCharsets.UTF_8);
                if (message.getTags() != null) { // a real broker may ask about the others, too
                    Object[] seen = shown(message);
                    seen[Arrays.asList(seen).indexOf("queueOffset") + 1] = null;
                    note("transactions: asked " + name, seen);
                }
                return "yes".equals(message.getTags()) ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        start(bank);
        Object[][] wanted = {
            {"commit", LocalTransactionState.COMMIT_MESSAGE, ""}, {"rollback", LocalTransactionState.ROLLBACK_MESSAGE, ""},
            {"asked", LocalTransactionState.UNKNOW, "yes"}, {"refused", LocalTransactionState.UNKNOW, "no"}};
        for (Object[] one : wanted) {
            Message message = new Message("oj-bank", (String) one[2], "k-" + one[0], bytes((String) one[0]));
            message.putUserProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", "1");
            message.putUserProperty("own", "1");
            SendResult result = bank.sendMessageInTransaction(message, one[1]);
            note("transactions: sent " + one[0], "status", result.getSendStatus().name(), "msgId", result.getMsgId(),
                "isId", result.getMsgId().equals(result.getTransactionId()), "hasOffsetId", result.getOffsetMsgId() != null);
        }
        Map<String, MessageExt> got = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = consumer("oj-bank-g");
        consumer.subscribe("oj-bank", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(one -> got.put(new String(one.getBody(), StandardCharsets.UTF_8), one));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        until(() -> got.size() >= 2);
        for (String name : got.keySet()) {
            got("transactions: got " + name, got.get(name));
        }
        consumer.shutdown();
        bank.shutdown();
    }

    static void replies() throws Exception {
        topic("oj-asked", 1);
        DefaultMQPushConsumer replier = consumer("oj-replies-g");
        replier.subscribe("oj-asked", "*");
        replier.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt one : messages) {
                try {
                    note("replies: asked", "body", new String(one.getBody(), StandardCharsets.UTF_8), "properties", properties(one));
                    Message reply = MessageUtil.createReplyMessage(one, bytes("42"));
                    reply.putUserProperty("own", "1");
                    reply.setKeys("k");
                    note("replies: reply", "status", producer.send(reply, 10_000).getSendStatus().name());
                } catch (Exception error) {
                    note("replies: reply failed", "error", String.valueOf(error));
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        replier.start();
        BlockingQueue<Object> got = new ArrayBlockingQueue<>(1);
        producer.request(new Message("oj-asked", "tag", bytes("how much?")), new RequestCallback() {
            @Override
            public void onSuccess(Message reply) {
                got.add(reply);
            }

            @Override
            public void onException(Throwable error) {
                got.add(error);
            }
        }, 40_000);
        Object found = got.poll(50, TimeUnit.SECONDS);
        if (found instanceof MessageExt one) {
            note("replies: replied", "body", new String(one.getBody(), StandardCharsets.UTF_8), "topic", one.getTopic(), "properties", properties(one));
        } else {
            note("replies: replied", "error", String.valueOf(found));
        }
        replier.shutdown();
    }

    static void lite() throws Exception {
        topic("oj-lite", 2);
        for (int number = 0; number < 10; number++) {
            producer.send(new Message("oj-lite", bytes("" + number)), queue("oj-lite", number % 2));
        }
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("oj-lite-g");
        consumer.setNamesrvAddr(namesrv);
        consumer.setAutoCommit(false);
        MessageQueue first = queue("oj-lite", 0);
        // The client cancels a queue's pull at a seek without waiting for it: it may then take the new position away, or
        // add what it found at the old one. A queue that was paused from the first pulls nothing.
        consumer.assign(List.of(first));
        consumer.pause(List.of(first));
        consumer.start();
        note("lite: queues", "count", consumer.fetchMessageQueues("oj-lite").size());
        consumer.seek(first, 2);
        consumer.resume(List.of(first));
        List<String> got = new ArrayList<>();
        until(() -> {
            consumer.poll(500).forEach(one -> got.add(one.getQueueOffset() + ":" + new String(one.getBody(), StandardCharsets.UTF_8)));
            return got.size() >= 3;
        });
        note("lite: from 2", "got", new ArrayList<>(got));
        consumer.commitSync();
        until(() -> {
            Long committed = consumer.committed(first);
            return committed != null && committed == 5;
        });
        note("lite: committed", "offset", consumer.committed(first));
        until(() -> {
            got.clear();
            consumer.seekToBegin(first); // again where the pull before it took the position away
            List<MessageExt> more;
            do {
                more = consumer.poll(2_000);
                more.forEach(one -> got.add(new String(one.getBody(), StandardCharsets.UTF_8)));
            } while (!more.isEmpty() && got.size() < 5);
            return got.size() >= 5;
        });
        note("lite: from the beginning", "got", new ArrayList<>(got));
        note("lite: by time", "past", consumer.offsetForTimestamp(first, 0L), "future", consumer.offsetForTimestamp(first, System.currentTimeMillis() + 60_000));
        consumer.shutdown();
    }

    static void pulls() throws Exception {
        topic("oj-pulls", 1);
        for (int number = 0; number < 5; number++) {
            producer.send(new Message("oj-pulls", number == 1 ? "b" : "a", bytes("" + number)));
        }
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("oj-pulls-g");
        consumer.setNamesrvAddr(namesrv);
        consumer.start();
        MessageQueue queue = queue("oj-pulls", 0);
        until(() -> consumer.maxOffset(queue) == 5);
        pulled("pulls: all", consumer.pull(queue, "*", 0, 32));
        pulled("pulls: two", consumer.pull(queue, "*", 1, 2));
        pulled("pulls: tag b", consumer.pull(queue, "b", 0, 32));
        pulled("pulls: tag c", consumer.pull(queue, "c", 0, 32));
        pulled("pulls: at the end", consumer.pull(queue, "*", 5, 32));
        pulled("pulls: beyond", consumer.pull(queue, "*", 9, 32));
        note("pulls: bounds", "min", consumer.minOffset(queue), "max", consumer.maxOffset(queue), "earliest", consumer.earliestMsgStoreTime(queue));
        note("pulls: offset", "none", consumer.fetchConsumeOffset(queue, true));
        consumer.updateConsumeOffset(queue, 3);
        consumer.getOffsetStore().persist(queue);
        until(() -> consumer.fetchConsumeOffset(queue, true) == 3);
        consumer.shutdown();
    }

    static void pulled(String name, PullResult result) {
        List<String> bodies = new ArrayList<>();
        if (result.getMsgFoundList() != null) {
            result.getMsgFoundList().forEach(one -> bodies.add(new String(one.getBody(), StandardCharsets.UTF_8)));
        }
        note(name, "status", result.getPullStatus().name(), "next", result.getNextBeginOffset(), "min", result.getMinOffset(), "max", result.getMaxOffset(), "bodies", bodies);
    }

    static void queries() throws Exception {
        topic("oj-queries", 1);
        Message one = new Message("oj-queries", "tag", "k1 same", bytes("one"));
        SendResult first = producer.send(one);
        producer.send(new Message("oj-queries", "tag", "k2 same", bytes("two")));
        until(() -> {
            try {
                return producer.queryMessage("oj-queries", "same", 32, 0, Long.MAX_VALUE).getMessageList().size() == 2;
            } catch (MQClientException error) {
                return false;
            }
        });
        got("queries: by key", producer.queryMessage("oj-queries", "k1", 32, 0, Long.MAX_VALUE).getMessageList().get(0));
        got("queries: by offset id", producer.viewMessage("oj-queries", first.getOffsetMsgId()));
        got("queries: by id", producer.viewMessage("oj-queries", first.getMsgId()));
        long stored = producer.viewMessage("oj-queries", first.getOffsetMsgId()).getStoreTimestamp();
        note("queries: by time", "of it", producer.searchOffset(queue("oj-queries", 0), stored), "later", producer.searchOffset(queue("oj-queries", 0), stored + 60_000));
    }

    static void broadcast() throws Exception {
        topic("oj-broadcast", 2);
        List<Set<String>> got = List.of(ConcurrentHashMap.newKeySet(), ConcurrentHashMap.newKeySet());
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int number = 0; number < 2; number++) {
            DefaultMQPushConsumer consumer = consumer("oj-broadcast-g");
            consumer.setInstanceName("broadcast-" + number);
            consumer.setMessageModel(MessageModel.BROADCASTING);
            consumer.subscribe("oj-broadcast", "*");
            Set<String> own = got.get(number);
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(one -> own.add(new String(one.getBody(), StandardCharsets.UTF_8)));
                return ConsumeConcurrentlyStatus.RECONSUME_LATER; // nothing comes again
            });
            consumer.start();
            consumers.add(consumer);
        }
        int[] count = {0};
        until(() -> {
            producer.send(new Message("oj-broadcast", bytes("" + count[0]++)));
            return got.get(0).size() > 3 && got.get(1).size() > 3;
        });
        note("broadcast: both", "first", got.get(0).size() > 3, "second", got.get(1).size() > 3);
        for (DefaultMQPushConsumer one : consumers) {
            one.shutdown();
        }
    }

    // ---- mqadmin -------------------------------------------------------------------------

    static class Commands extends MQAdminStartup {
        static List<SubCommand> all() {
            return SUB_COMMANDS;
        }
    }

    /** Runs a command as MQAdminStartup does, which several threads cannot. */
    static void run(String[] words) throws Exception {
        for (SubCommand command : Commands.all()) {
            if (command.commandName().equals(words[0])) {
                Options options = command.buildCommandlineOptions(ServerUtil.buildCommandlineOptions(new Options()));
                List<String> line = new ArrayList<>(Arrays.asList(words).subList(1, words.length));
                line.addAll(List.of("-n", namesrv));
                try {
                    command.execute(new DefaultParser().parse(options, line.toArray(new String[0])), options, null);
                } catch (Exception error) {
                    error.printStackTrace();
                }
            }
        }
    }

    /** Runs commands, several at a time: each ends its own client, which takes a second. */
    static void commands() throws Exception {
        topic("oj-admin", 2);
        SendResult sent = producer.send(new Message("oj-admin", "tag", "k1", bytes("hello")), queue("oj-admin", 0));
        Set<String> got = ConcurrentHashMap.newKeySet();
        DefaultMQPushConsumer member = consumer("oj-admin-g");
        member.subscribe("oj-admin", "*");
        member.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(one -> got.add(one.getMsgId()));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        member.start();
        until(() -> got.contains(sent.getMsgId()));
        member.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        until(() -> admin.examineConsumeStats("oj-admin-g").computeTotalDiff() == 0);
        String brokerName = queue("oj-admin", 0).getBrokerName();
        InheritableThreadLocal<ByteArrayOutputStream> said = new InheritableThreadLocal<>();
        PrintStream split = new PrintStream(new OutputStream() {
            @Override
            public void write(int one) {
                ByteArrayOutputStream own = said.get();
                if (own != null) {
                    own.write(one);
                }
            }
        }, true, StandardCharsets.UTF_8);
        System.setOut(split);
        System.setErr(split);
        String[][] all = {
            {"clusterList"}, {"clusterList", "-m"}, {"topicRoute", "-t", "oj-admin"}, {"topicStatus", "-t", "oj-admin"},
            {"topicClusterList", "-t", "oj-admin"}, {"updateTopic", "-c", "DefaultCluster", "-t", "oj-made"},
            {"deleteTopic", "-c", "DefaultCluster", "-t", "oj-never"}, {"updateSubGroup", "-c", "DefaultCluster", "-g", "oj-sub"},
            {"deleteSubGroup", "-c", "DefaultCluster", "-g", "oj-nobody"},
            {"producerConnection", "-g", "oj-producer", "-t", "oj-admin"}, {"queryMsgByKey", "-t", "oj-admin", "-k", "k1"},
            {"queryMsgByOffset", "-t", "oj-admin", "-b", brokerName, "-i", "0", "-o", "0"},
            {"queryCq", "-t", "oj-admin", "-q", "0", "-i", "0", "-b", broker},
            {"resetOffsetByTime", "-g", "oj-sends-g", "-t", "oj-sends", "-s", "0"},
            {"sendMessage", "-t", "oj-pulls", "-p", "x", "-b", brokerName, "-i", "0"}, {"cleanUnusedTopic", "-b", broker},
            {"topicList"}, {"consumerConnection", "-g", "oj-admin-g"}, {"consumerProgress", "-g", "oj-admin-g"},
            {"consumerStatus", "-g", "oj-admin-g", "-s"}, {"brokerStatus", "-b", broker},
            {"queryMsgById", "-t", "oj-admin", "-i", sent.getOffsetMsgId()}};
        MQAdminStartup.initCommand();
        ExecutorService pool = Executors.newCachedThreadPool();
        List<Future<String>> found = new ArrayList<>();
        for (String[] one : all) {
            found.add(pool.submit(() -> {
                for (;;) {
                    ByteArrayOutputStream own = new ByteArrayOutputStream();
                    said.set(own);
                    run(one);
                    said.remove();
                    String text = own.toString(StandardCharsets.UTF_8);
                    if (!text.contains("has created already")) { // clients are named by the time of their start
                        return text;
                    }
                }
            }));
        }
        for (int at = 0; at < all.length; at++) {
            List<String> words = new ArrayList<>(Arrays.asList(all[at]));
            words.replaceAll(word -> word.equals(broker) ? "BROKER" : word.equals(sent.getOffsetMsgId()) ? "ID" : word);
            note("mqadmin: " + String.join(" ", words), "lines", Arrays.asList(found.get(at).get(60, TimeUnit.SECONDS).split("\n")));
        }
        member.shutdown();
    }
}
