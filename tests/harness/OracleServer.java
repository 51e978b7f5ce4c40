import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider;
import org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider;
import org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider;
import org.apache.rocketmq.auth.authorization.provider.LocalAuthorizationMetadataProvider;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.BrokerStartup;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.topic.TopicValidator;
import org.apache.rocketmq.namesrv.NamesrvStartup;
import org.apache.rocketmq.proxy.ProxyStartup;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * A name server and a broker of RocketMQ, small, on this machine alone. Arguments: a folder, their ports, and the port
 * of a proxy for gRPC, or access key and secret key of an administrator, where requests must be signed. Prints READY, and
 * runs until it is killed.
 */
public class OracleServer {
    public static void main(String[] arguments) throws Exception {
        Path folder = Path.of(arguments[0]);
        String namesrv = "127.0.0.1:" + arguments[1];
        Path ofNamesrv = folder.resolve("namesrv.conf"), ofBroker = folder.resolve("broker.conf");
        Files.writeString(ofNamesrv, "listenPort=" + arguments[1] + "\nbindAddress=127.0.0.1\n"
            + "kvConfigPath=" + folder.resolve("kv.json") + "\n");
        Files.writeString(ofBroker, String.join("\n",
            "brokerName=broker-a", "brokerClusterName=DefaultCluster", "brokerId=0",
            "namesrvAddr=" + namesrv, "brokerIP1=127.0.0.1", "bindAddress=127.0.0.1",
            "listenPort=" + arguments[2], "storePathRootDir=" + folder.resolve("store"),
            "storePathCommitLog=" + folder.resolve("store/commitlog"),
            "mappedFileSizeCommitLog=67108864", "mappedFileSizeConsumeQueue=60000", "mappedFileSizeTimerLog=1024000",
            "maxIndexNum=4096", "maxHashSlotNum=1024", "timerPrecisionMs=100", "diskMaxUsedSpaceRatio=95",
            "transientStorePoolEnable=false", "warmMapedFileEnable=false", "enablePropertyFilter=true",
            "brokerFastFailureEnable=false", "traceTopicEnable=true", "recallMessageEnable=true",
            "transactionTimeOut=1000", "transactionCheckInterval=1000", ""));
        RPCHook hook = null;
        boolean hasProxy = arguments.length == 4;
        if (arguments.length > 4) {
            Files.writeString(ofBroker, users(arguments[3], arguments[4]), StandardOpenOption.APPEND);
            hook = new AclClientRPCHook(new SessionCredentials(arguments[3], arguments[4]));
        }
        NamesrvStartup.main(new String[] {"-c", ofNamesrv.toString()});
        BrokerController broker = null;
        if (hasProxy) {
            // Ended transactions are asked about again, and delivered twice, if that is done within a second.
            Files.writeString(ofBroker, "transactionTimeOut=6000\n", StandardOpenOption.APPEND);
            Path ofProxy = folder.resolve("proxy.json");
            Files.writeString(ofProxy, "{\"rocketMQClusterName\":\"DefaultCluster\",\"namesrvAddr\":\"" + namesrv
                + "\",\"grpcServerPort\":" + arguments[3] + ",\"remotingListenPort\":0,\"localServeAddr\":\"127.0.0.1\","
                + "\"enableTopicMessageTypeCheck\":false}");
            ProxyStartup.main(new String[] {"-pm", "local", "-bc", ofBroker.toString(), "-pc", ofProxy.toString()});
        } else {
            broker = BrokerStartup.start(BrokerStartup.createBrokerController(new String[] {"-c", ofBroker.toString()}));
        }
        DefaultMQProducer asks = new DefaultMQProducer("ready", hook);
        asks.setNamesrvAddr(namesrv);
        asks.start();
        for (boolean isKnown = false; !isKnown; ) {
            if (broker != null) {
                broker.registerBrokerAll(true, false, true);
            }
            try {
                asks.fetchPublishMessageQueues(TopicValidator.AUTO_CREATE_TOPIC_KEY_TOPIC);
                isKnown = true;
            } catch (MQClientException error) {
                Thread.sleep(100);
            }
        }
        asks.shutdown();
        System.out.println("READY");
        Thread.currentThread().join();
    }

    /** Settings of a broker whose requests must be signed. */
    static String users(String accessKey, String secretKey) {
        return String.join("\n", "authenticationEnabled=true", "authorizationEnabled=true",
            "authenticationProvider=" + DefaultAuthenticationProvider.class.getName(),
            "authenticationMetadataProvider=" + LocalAuthenticationMetadataProvider.class.getName(),
            "authorizationProvider=" + DefaultAuthorizationProvider.class.getName(),
            "authorizationMetadataProvider=" + LocalAuthorizationMetadataProvider.class.getName(),
            "initAuthenticationUser={\"username\":\"" + accessKey + "\",\"password\":\"" + secretKey + "\"}",
            "innerClientAuthenticationCredentials={\"accessKey\":\"" + accessKey + "\",\"secretKey\":\"" + secretKey + "\"}", "");
    }
}
