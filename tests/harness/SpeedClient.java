import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;

import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/**
 * Speeds of an unchanged client by remoting, with messages of 200 bytes. Arguments: name server, topic, which has no
 * messages, and milliseconds of each measurement. Prints a line for each: its name and what was measured, with a tab between.
 */
public class SpeedClient {
    static final int IN_FLIGHT = 256, BATCHES = 8, IN_BATCH = 256;
    static final byte[] BODY = "x".repeat(200).getBytes(StandardCharsets.UTF_8);
    static final AtomicLong stored = new AtomicLong(), failed = new AtomicLong();
    static DefaultMQProducer producer;
    static String topic;

    interface Sending {
        void send(SendCallback callback) throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        topic = arguments[1];
        long forMs = Long.parseLong(arguments[2]);
        producer = new DefaultMQProducer("speed");
        producer.setNamesrvAddr(arguments[0]);
        producer.setSendMsgTimeout(20_000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.start();
        one(forMs / 2);
        say("sync_send_p50_us", one(forMs));
        Sending single = callback -> producer.send(new Message(topic, BODY), callback);
        many(single, IN_FLIGHT, 1, forMs / 2);
        say("async_sends_per_s", many(single, IN_FLIGHT, 1, forMs));
        Sending batch = callback -> producer.send(batch(), callback);
        many(batch, BATCHES, IN_BATCH, forMs / 2);
        say("batched_per_s", many(batch, BATCHES, IN_BATCH, forMs));
        say("consumed_per_s", consume(arguments[0]));
        if (failed.get() > 0) {
            throw new IllegalStateException(failed + " sends failed");
        }
        Runtime.getRuntime().halt(0);
    }

    static void say(String what, long value) {
        System.out.println(what + "\t" + value);
    }

    static List<Message> batch() {
        List<Message> found = new ArrayList<>(IN_BATCH);
        for (int number = 0; number < IN_BATCH; number++) {
            found.add(new Message(topic, BODY));
        }
        return found;
    }

    /** One send after the other; their median in microseconds. */
    static long one(long forMs) throws Exception {
        long end = System.nanoTime() + forMs * 1_000_000;
        long[] took = new long[1_000_000];
        int count = 0;
        for (long begun = System.nanoTime(); begun < end; count++) {
            producer.send(new Message(topic, BODY));
            long now = System.nanoTime();
            took[count] = now - begun;
            begun = now;
        }
        stored.addAndGet(count);
        Arrays.sort(took, 0, count);
        return took[count / 2] / 1_000;
    }

    /** Sends with so many in flight; messages a second, from the first send to the last answer. */
    static long many(Sending sending, int inFlight, int messages, long forMs) throws Exception {
        Semaphore free = new Semaphore(inFlight);
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                free.release();
            }

            @Override
            public void onException(Throwable error) {
                failed.incrementAndGet();
                free.release();
            }
        };
        long begun = System.nanoTime(), sent = 0;
        while (System.nanoTime() - begun < forMs * 1_000_000) {
            free.acquire();
            sending.send(callback);
            sent += messages;
        }
        free.acquire(inFlight);
        stored.addAndGet(sent);
        return sent * 1_000_000_000 / (System.nanoTime() - begun);
    }

    /** Consumes all; messages a second, from the first to the last. */
    static long consume(String namesrv) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("speed");
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.setConsumeMessageBatchMaxSize(32);
        AtomicLong got = new AtomicLong(), first = new AtomicLong(), last = new AtomicLong();
        CountDownLatch all = new CountDownLatch(1);
        consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
            first.compareAndSet(0, System.nanoTime());
            if (got.addAndGet(messages.size()) >= stored.get()) {
                last.set(System.nanoTime());
                all.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        all.await();
        return got.get() * 1_000_000_000 / (last.get() - first.get());
    }
}
