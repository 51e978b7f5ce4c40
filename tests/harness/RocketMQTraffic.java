import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.broker.BrokerStartup;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.topic.TopicValidator;
import org.apache.rocketmq.namesrv.NamesrvStartup;

/**
 * A name server, a broker and their clients in one process: sends some messages of all kinds, has
 * them consumed, and prints the broker's page for Prometheus once it has all names that are wanted.
 *
 * Arguments: a folder; then the names that the page must have, of histograms without suffix.
 */
public class RocketMQTraffic {
    private static final String NAMESRV = "127.0.0.1:9876";
    private static final URI PAGE = URI.create("http://127.0.0.1:5557/metrics");
    private static final long PATIENCE_MS = 120_000;

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
        Path folder = Path.of(args[0]);
        List<String> wanted = Arrays.asList(args).subList(1, args.length);
        start(folder);
        send();
        String page = "";
        long end = System.currentTimeMillis() + PATIENCE_MS;
        while (missing(page, wanted) != null) {
            if (System.currentTimeMillis() > end) {
                throw new IllegalStateException("the page never had " + missing(page, wanted));
            }
            Thread.sleep(100);
            page = get();
        }
        System.out.println(page);
    }

    private static void start(Path folder) throws Exception {
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
            "metricsExporterType=PROM", "metricsPromExporterHost=127.0.0.1",
            "metricsPromExporterPort=5557", ""));
        NamesrvStartup.main(new String[] {"-c", namesrv.toString()});
        BrokerStartup.main(new String[] {"-c", broker.toString()});
    }

    private static void send() throws Exception {
        DefaultMQProducer shop = new DefaultMQProducer("shop");
        shop.setNamesrvAddr(NAMESRV);
        shop.setSendMsgTimeout(20_000);
        shop.start();
        awaitRoute(shop);
        for (String body : List.of("one", "bad")) {
            shop.send(message(body));
        }
        Message delayed = message("late");
        delayed.setDelayTimeLevel(1);
        shop.send(delayed);
        shop.sendOneway(message("oneway"));

        TransactionMQProducer pay = new TransactionMQProducer("pay");
        pay.setNamesrvAddr(NAMESRV);
        pay.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                return (LocalTransactionState) state;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        pay.start();
        pay.sendMessageInTransaction(message("paid"), LocalTransactionState.COMMIT_MESSAGE);
        pay.sendMessageInTransaction(message("void"), LocalTransactionState.ROLLBACK_MESSAGE);

        DefaultMQPushConsumer billing = new DefaultMQPushConsumer("billing");
        billing.setNamesrvAddr(NAMESRV);
        billing.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        billing.setMaxReconsumeTimes(0);
        billing.subscribe("orders", "*");
        billing.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
            new String(messages.get(0).getBody(), StandardCharsets.UTF_8).equals("bad")
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                : ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        billing.start();
    }

    /** The name server learns of the broker a moment after it has started. */
    private static void awaitRoute(DefaultMQProducer producer) throws Exception {
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
