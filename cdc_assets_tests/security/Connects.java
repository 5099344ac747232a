import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URLDecoder;
import java.sql.Connection;
import java.sql.DriverManager;
import java.util.Properties;

/** A connection for each line of stdin, an address and its properties, tab-separated. */
public class Connects {
  public static void main(String[] none) throws Exception {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    for (String line; (line = in.readLine()) != null; ) {
      String[] words = line.split("\t");
      Properties given = new Properties();
      for (int i = 1; i < words.length; i++) {
        String[] pair = words[i].split("=", 2);
        given.setProperty(pair[0], URLDecoder.decode(pair[1], "UTF-8"));
      }
      try (Connection made = DriverManager.getConnection(words[0], given)) {
        System.out.println("connected");
      } catch (Exception error) {
        System.out.println("refused: " + error.getMessage().replace('\n', ' '));
      }
      System.out.flush();
    }
  }
}
