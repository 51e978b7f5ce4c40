import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.AccessChannel;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.trace.TraceBean;
import org.apache.rocketmq.client.trace.TraceContext;
import org.apache.rocketmq.client.trace.TraceDataEncoder;
import org.apache.rocketmq.client.trace.TraceType;
import org.apache.rocketmq.common.message.MessageType;

/** RocketMQ's own codec of trace records: "encode" writes some, "decode" reads what comes, and says each field. */
public class TraceRecords {
    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, true, "UTF-8");
        if (arguments[0].equals("encode")) {
            encode(out);
            return;
        }
        String text = new String(System.in.readAllBytes(), StandardCharsets.UTF_8);
        for (TraceContext context : TraceDataEncoder.decoderFromTraceDataString(text)) {
            out.println(describe(context));
        }
    }

    private static void encode(PrintStream out) {
        for (MessageType type : MessageType.values()) {
            for (boolean success : new boolean[] {true, false}) {
                TraceContext context = context(TraceType.Pub, bean(type));
                context.setCostTime(17);
                context.setSuccess(success);
                out.print(TraceDataEncoder.encoderFromContextBean(context).getTransData());
            }
        }
        TraceBean bare = bean(MessageType.Normal_Msg);
        bare.setTags(null);
        bare.setKeys(null);
        bare.setOffsetMsgId(null);
        out.print(TraceDataEncoder.encoderFromContextBean(context(TraceType.Pub, bare)).getTransData());
        TraceBean second = bean(MessageType.Normal_Msg);
        second.setMsgId("7F000001123418B4AAC20000000B0002");
        second.setKeys(null);
        second.setRetryTimes(16);
        out.print(TraceDataEncoder.encoderFromContextBean(
            context(TraceType.SubBefore, bean(MessageType.Normal_Msg), second)).getTransData());
        for (int code = 0; code < 5; code++) {
            TraceContext after = context(TraceType.SubAfter, bean(MessageType.Normal_Msg), second);
            after.setCostTime(3);
            after.setSuccess(code == 0);
            after.setContextCode(code);
            after.setAccessChannel(AccessChannel.LOCAL);
            out.print(TraceDataEncoder.encoderFromContextBean(after).getTransData());
        }
        for (LocalTransactionState state : LocalTransactionState.values()) {
            TraceBean end = bean(MessageType.Trans_msg_Commit);
            end.setTransactionId("7F000001123418B4AAC20000000B0001");
            end.setTransactionState(state);
            end.setFromTransactionCheck(state == LocalTransactionState.ROLLBACK_MESSAGE);
            out.print(TraceDataEncoder.encoderFromContextBean(context(TraceType.EndTransaction, end)).getTransData());
        }
    }

    private static TraceContext context(TraceType type, TraceBean... beans) {
        TraceContext context = new TraceContext();
        context.setTraceType(type);
        context.setTimeStamp(1_780_000_000_123L);
        context.setRegionId("DefaultRegion");
        context.setGroupName("billing-ü");
        context.setRequestId("7F000001123418B4AAC20000000B0003");
        context.setTraceBeans(new ArrayList<>(List.of(beans)));
        return context;
    }

    private static TraceBean bean(MessageType type) {
        TraceBean bean = new TraceBean();
        bean.setTopic("orders");
        bean.setMsgId("7F000001123418B4AAC20000000B0001");
        bean.setTags("new");
        bean.setKeys("4711 größe 订单");
        bean.setStoreHost("10.0.0.7:10911");
        bean.setBodyLength(128);
        bean.setMsgType(type);
        bean.setOffsetMsgId("0A0000070002A9F0000000000000BEEF");
        bean.setRetryTimes(2);
        return bean;
    }

    private static String describe(TraceContext one) {
        TraceBean bean = one.getTraceBeans().get(0);
        Object[] fields;
        switch (one.getTraceType()) {
            case Pub:
                fields = new Object[] {
                    one.getTimeStamp(), one.getRegionId(), one.getGroupName(), bean.getTopic(), bean.getMsgId(),
                    bean.getTags(), bean.getKeys(), bean.getStoreHost(), bean.getBodyLength(), one.getCostTime(),
                    bean.getMsgType().ordinal(), bean.getOffsetMsgId(), one.isSuccess()};
                break;
            case SubBefore:
                fields = new Object[] {
                    one.getTimeStamp(), one.getRegionId(), one.getGroupName(), one.getRequestId(), bean.getMsgId(),
                    bean.getRetryTimes(), bean.getKeys()};
                break;
            case SubAfter:
                fields = new Object[] {
                    one.getRequestId(), bean.getMsgId(), one.getCostTime(), one.isSuccess(), bean.getKeys(),
                    one.getContextCode(), one.getTimeStamp(), one.getGroupName()};
                break;
            default:
                fields = new Object[] {
                    one.getTimeStamp(), one.getRegionId(), one.getGroupName(), bean.getTopic(), bean.getMsgId(),
                    bean.getTags(), bean.getKeys(), bean.getStoreHost(), bean.getMsgType().ordinal(),
                    bean.getTransactionId(), bean.getTransactionState(), bean.isFromTransactionCheck()};
        }
        StringBuilder text = new StringBuilder(one.getTraceType().name());
        for (Object field : fields) {
            text.append('\t').append(field);
        }
        return text.toString();
    }
}
