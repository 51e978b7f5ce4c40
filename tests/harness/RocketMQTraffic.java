import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.BrokerStartup;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.trace.AsyncTraceDispatcher;
import org.apache.rocketmq.client.trace.TraceBean;
import org.apache.rocketmq.client.trace.TraceContext;
import org.apache.rocketmq.client.trace.TraceDataEncoder;
import org.apache.rocketmq.client.trace.TraceDispatcher;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.producer.RecallMessageHandle;
import org.apache.rocketmq.common.topic.TopicValidator;
import org.apache.rocketmq.namesrv.NamesrvStartup;

/**
 * A name server, a broker and their clients in one process: sends some messages of all kinds, has
 * them consumed, all with message trace on, and prints the broker's page for Prometheus once it has
 * all names that are wanted.
 *
 * Arguments: a folder; the names that the page must have, of histograms without suffix; "--"; the
 * events that the trace must have, as "event" says them. In the folder it leaves "sent.tsv" (name,
 * message id and, where the client tells it, offset message id of what was sent) and "traces.tsv"
 * (keys and body of each message of the trace topic, in Base64).
 */
public class RocketMQTraffic {
    private static final String NAMESRV = "127.0.0.1:9876";
    private static final URI PAGE = URI.create("http://127.0.0.1:5557/metrics");
    private static final long PATIENCE_MS = 120_000;
    private static final int TIMEOUT_MS = 60_000;

    /** Of messages that were sent, by id. */
    private static final Map<String, String> NAMES = new ConcurrentHashMap<>();
    private static final List<String> SENT = new ArrayList<>();
    private static final Set<String> TRACES = ConcurrentHashMap.newKeySet();
    private static final Set<String> EVENTS = ConcurrentHashMap.newKeySet();

    public static void main(String[] args) {
        try {
            run(args);
            System.out.flush();
            // Its threads would take seconds to end in order.
            Runtime.getRuntime().halt(0);
        } catch (Throwable error) {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static void run(String[] args) throws Exception {
        // A group's retry topic is new to it, and not looked for in each 20 s only.
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000");
        Path folder = Path.of(args[0]);
        int middle = Arrays.asList(args).indexOf("--");
        List<String> names = Arrays.asList(args).subList(1, middle);
        List<String> events = Arrays.asList(args).subList(middle + 1, args.length);
        BrokerController broker = start(folder);
        shop(broker);
        pay();
        billing();
        reader();
        String page = "";
        long end = System.currentTimeMillis() + PATIENCE_MS;
        while (missing(page, names) != null || !EVENTS.containsAll(events)) {
            if (System.currentTimeMillis() > end) {
                throw new IllegalStateException(
                    "the page never had " + missing(page, names) + ", or the trace had only " + EVENTS);
            }
            Thread.sleep(100);
            page = get();
        }
        Files.write(folder.resolve("sent.tsv"), SENT);
        Files.write(folder.resolve("traces.tsv"), TRACES);
        System.out.println(page);
    }

    private static BrokerController start(Path folder) throws Exception {
        Path namesrv = folder.resolve("namesrv.conf"), broker = folder.resolve("broker.conf");
        Files.writeString(namesrv, "listenPort=9876\nbindAddress=127.0.0.1\n");
        Files.writeString(broker, String.join("\n",
            "brokerName=broker-a", "brokerClusterName=DefaultCluster", "brokerId=0",
            "namesrvAddr=" + NAMESRV, "brokerIP1=127.0.0.1", "bindAddress=127.0.0.1",
            "listenPort=10911", "storePathRootDir=" + folder.resolve("store"),
            "storePathCommitLog=" + folder.resolve("store/commitlog"),
            "mappedFileSizeCommitLog=16777216", "mappedFileSizeConsumeQueue=60000",
            "maxIndexNum=4096", "maxHashSlotNum=1024", "timerWheelEnable=false",
            "transientStorePoolEnable=false", "warmMapedFileEnable=false",
            // On a slow machine too: nothing is refused, and all that is asked for is stored.
            "brokerFastFailureEnable=false", "traceTopicEnable=true",
            "transactionTimeOut=60000", "transactionCheckInterval=2000",
            "metricsExporterType=PROM", "metricsPromExporterHost=127.0.0.1",
            "metricsPromExporterPort=5557", ""));
        NamesrvStartup.main(new String[] {"-c", namesrv.toString()});
        return BrokerStartup.start(
            BrokerStartup.createBrokerController(new String[] {"-c", broker.toString()}));
    }

    private static void shop(BrokerController broker) throws Exception {
        System.setProperty("com.rocketmq.recall.default.trace.enable", "true");
        DefaultMQProducer shop = new DefaultMQProducer("shop", true, null);
        shop.setNamesrvAddr(NAMESRV);
        shop.setSendMsgTimeout(TIMEOUT_MS);
        shop.start();
        patient(shop.getTraceDispatcher());
        awaitRoute(shop, broker);
        Message one = message("one");
        one.setKeys(List.of("4711", "größe", "订单"));
        sent("one", one, shop.send(one));
        Message bad = message("bad");
        sent("bad", bad, shop.send(bad));
        Message late = message("late");
        late.setDelayTimeLevel(1);
        sent("late", late, shop.send(late));
        Message first = message("first"), second = message("second");
        SendResult both = shop.send(List.of(first, second));
        sent("first", first, both);
        sent("second", second, both);
        NAMES.put(both.getMsgId(), "both");
        SENT.add(String.join("\t", "both", both.getMsgId(), both.getOffsetMsgId()));
        Message oneway = message("oneway");
        shop.sendOneway(oneway);
        sent("oneway", oneway, null);
        String handle = RecallMessageHandle.HandleV1.buildHandle(
            "orders", "broker-a", "0", MessageClientIDSetter.getUniqID(late));
        try {
            shop.recallMessage("orders", handle);
            throw new IllegalStateException("the broker was not told to allow it");
        } catch (MQBrokerException expected) {
            // It is traced as all the others.
        }
    }

    private static void pay() throws Exception {
        TransactionMQProducer pay = new TransactionMQProducer("pay", null, true, null);
        pay.setNamesrvAddr(NAMESRV);
        pay.setSendMsgTimeout(TIMEOUT_MS);
        pay.setTraceMsgBatchNum(1);
        pay.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                return (LocalTransactionState) state;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return body(message).equals("void")
                    ? LocalTransactionState.ROLLBACK_MESSAGE
                    : LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        pay.start();
        patient(pay.getTraceDispatcher());
        Message paid = message("paid"), void_ = message("void"), asked = message("asked");
        paid.setKeys("4711");
        asked.setKeys("4712");
        asked.putUserProperty(MessageConst.PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS, "0");
        sent("paid", paid, pay.sendMessageInTransaction(paid, LocalTransactionState.COMMIT_MESSAGE));
        sent("void", void_, pay.sendMessageInTransaction(void_, LocalTransactionState.ROLLBACK_MESSAGE));
        sent("asked", asked, pay.sendMessageInTransaction(asked, LocalTransactionState.UNKNOW));
    }

    private static void billing() throws Exception {
        DefaultMQPushConsumer billing = new DefaultMQPushConsumer("billing", true, null);
        billing.setNamesrvAddr(NAMESRV);
        billing.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        billing.setPollNameServerInterval(1_000);
        billing.setTraceMsgBatchNum(2);
        billing.setMaxReconsumeTimes(2);
        billing.subscribe("orders", "*");
        billing.registerMessageListener((MessageListenerConcurrently) RocketMQTraffic::consume);
        billing.start();
        patient(billing.getTraceDispatcher());
    }

    /** The bad one fails in each way in turn. */
    private static ConsumeConcurrentlyStatus consume(
        List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        context.setDelayLevelWhenNextConsume(1);
        MessageExt message = messages.get(0);
        if (!body(message).equals("bad")) {
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        }
        switch (message.getReconsumeTimes()) {
            case 0:
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            case 1:
                throw new IllegalArgumentException("bad");
            default:
                return null;
        }
    }

    /** Reads the trace topic as any other. */
    private static void reader() throws Exception {
        DefaultMQPushConsumer reader = new DefaultMQPushConsumer("reader");
        reader.setNamesrvAddr(NAMESRV);
        reader.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        reader.subscribe(TopicValidator.RMQ_SYS_TRACE_TOPIC, "*");
        reader.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                byte[] keys = message.getKeys().getBytes(StandardCharsets.UTF_8);
                TRACES.add(base64(keys) + "\t" + base64(message.getBody()));
                for (TraceContext one : TraceDataEncoder.decoderFromTraceDataString(body(message))) {
                    EVENTS.add(event(one));
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        reader.start();
    }

    /** A record's kind, the message's name, and what is behind it. */
    private static String event(TraceContext one) {
        TraceBean bean = one.getTraceBeans().get(0);
        String event = one.getTraceType() + " " + NAMES.get(bean.getMsgId());
        switch (one.getTraceType()) {
            case SubBefore:
                return event + " " + bean.getRetryTimes();
            case SubAfter:
                return event + " " + one.getContextCode();
            case EndTransaction:
                return event + " " + bean.getTransactionState();
            default:
                return event;
        }
    }

    private static void sent(String name, Message message, SendResult result) {
        String id = MessageClientIDSetter.getUniqID(message);
        NAMES.put(id, name);
        String offsetId = result == null ? null : result.getOffsetMsgId();
        SENT.add(String.join("\t", name, id, offsetId == null ? "" : offsetId));
    }

    /** On a slow machine too no record may be lost. */
    private static void patient(TraceDispatcher dispatcher) {
        ((AsyncTraceDispatcher) dispatcher).getTraceProducer().setSendMsgTimeout(TIMEOUT_MS);
    }

    private static String body(MessageExt message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    private static String base64(byte[] data) {
        return Base64.getEncoder().encodeToString(data);
    }

    /** A broker that has just started has not found the name server yet, and tries again after 10 s. */
    private static void awaitRoute(DefaultMQProducer producer, BrokerController broker) throws Exception {
        long end = System.currentTimeMillis() + PATIENCE_MS;
        while (true) {
            try {
                producer.fetchPublishMessageQueues(TopicValidator.AUTO_CREATE_TOPIC_KEY_TOPIC);
                return;
            } catch (MQClientException error) {
                if (System.currentTimeMillis() > end) {
                    throw error;
                }
                Thread.sleep(100);
                broker.registerBrokerAll(true, false, true);
            }
        }
    }

    private static Message message(String body) {
        return new Message("orders", "tag", body.getBytes(StandardCharsets.UTF_8));
    }

    private static String missing(String page, List<String> wanted) {
        return wanted.stream()
            .filter(name -> !page.contains("\n" + name + "{"))
            .filter(name -> !page.contains("\n" + name + "_count{"))
            .findFirst().orElse(page.isEmpty() ? "anything" : null);
    }

    private static String get() throws Exception {
        HttpRequest request = HttpRequest.newBuilder(PAGE).build();
        return HttpClient.newHttpClient()
            .send(request, HttpResponse.BodyHandlers.ofString()).body();
    }
}
