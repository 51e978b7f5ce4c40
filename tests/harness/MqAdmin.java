import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Runs commands of mqadmin: arguments by tabs, a line each; prints what each says, and a line that ends it. */
public class MqAdmin {
    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            ByteArrayOutputStream said = new ByteArrayOutputStream();
            PrintStream stream = new PrintStream(said, true, StandardCharsets.UTF_8);
            System.setOut(stream);
            System.setErr(stream);
            MQAdminStartup.main(line.split("\t"));
            stream.flush();
            out.write(said.toByteArray());
            out.println("\n@@");
            out.flush();
        }
        System.exit(0);
    }
}
