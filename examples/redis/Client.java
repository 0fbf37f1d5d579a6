import java.util.List;
import redis.clients.jedis.Jedis;

public class Client {
    public static void main(String[] arguments) {
        try (Jedis tidegate = new Jedis("127.0.0.1", 8083)) {
            List<?> decision =
                (List<?>) tidegate.sendCommand(() -> "TG.ACQUIRE".getBytes(), "per-user", "user123");
            boolean allowed = (Long) decision.get(0) == 1;
            System.out.println(
                allowed
                    ? "allowed, " + decision.get(2) + " left"
                    : "denied, retry in " + decision.get(3) + " ms");
        }
    }
}
