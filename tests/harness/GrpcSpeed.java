import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;

import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;

/**
 * The rate of sends of an unchanged client by gRPC, with 64 messages of 200 bytes in flight. Arguments: address, topic, and
 * milliseconds. Prints a line: a name and what was measured, with a tab between.
 */
public class GrpcSpeed {
    static final int IN_FLIGHT = 64;
    static final byte[] BODY = "x".repeat(200).getBytes(StandardCharsets.UTF_8);
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    static final AtomicLong failed = new AtomicLong();

    public static void main(String[] arguments) throws Exception {
        ClientConfiguration configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0])
            .enableSsl(false).setRequestTimeout(Duration.ofSeconds(20)).build();
        Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration)
            .setTopics(arguments[1]).build();
        long forMs = Long.parseLong(arguments[2]);
        send(producer, arguments[1], forMs);
        System.out.println("grpc_sends_per_s\t" + send(producer, arguments[1], forMs));
        if (failed.get() > 0) {
            throw new IllegalStateException(failed + " sends failed");
        }
        Runtime.getRuntime().halt(0);
    }

    /** Sends; messages a second, from the first send to the last answer. */
    static long send(Producer producer, String topic, long forMs) throws Exception {
        Semaphore free = new Semaphore(IN_FLIGHT);
        long begun = System.nanoTime(), sent = 0;
        while (System.nanoTime() - begun < forMs * 1_000_000) {
            free.acquire();
            Message message = PROVIDER.newMessageBuilder().setTopic(topic).setBody(BODY).build();
            producer.sendAsync(message).whenComplete((receipt, error) -> {
                if (error != null) {
                    failed.incrementAndGet();
                }
                free.release();
            });
            sent++;
        }
        free.acquire(IN_FLIGHT);
        return sent * 1_000_000_000 / (System.nanoTime() - begun);
    }
}
