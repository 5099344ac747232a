import com.fasterxml.jackson.core.type.TypeReference;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.CatalogUtil;
import org.apache.iceberg.catalog.Catalog;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.sparkproject.jetty.server.Server;
import org.sparkproject.jetty.servlet.ServletContextHandler;
import org.sparkproject.jetty.servlet.ServletHolder;

/** Serves a catalog by Iceberg's servlet: its settings are a line of JSON; ends when stdin does. */
public class RestServer {
    public static void main(String[] none) throws Exception {
        PrintStream told = System.out;
        System.setOut(System.err); // what is logged
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
        Map<String, String> settings =
                new ObjectMapper().readValue(asked.readLine(), new TypeReference<>() {});
        Catalog catalog =
                CatalogUtil.buildIcebergCatalog("reference", settings, new Configuration());
        RESTCatalogServlet servlet = new RESTCatalogServlet(new RESTCatalogAdapter(catalog));
        ServletContextHandler routes = new ServletContextHandler();
        routes.addServlet(new ServletHolder(servlet), "/*");
        Server server = new Server(new InetSocketAddress("127.0.0.1", 0));
        server.setHandler(routes);
        server.start();
        told.println("http://127.0.0.1:" + server.getURI().getPort());
        while (asked.read() >= 0) {}
        System.exit(0);
    }
}
