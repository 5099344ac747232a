import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.util.Arrays;
import java.util.Map;
import java.util.stream.Collectors;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.CatalogUtil;
import org.apache.iceberg.catalog.Catalog;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.sparkproject.jetty.server.Server;
import org.sparkproject.jetty.servlet.ServletContextHandler;
import org.sparkproject.jetty.servlet.ServletHolder;

/** Serves the catalog of these settings by Iceberg's servlet; prints where, ends with stdin. */
public class RestServer {
    public static void main(String[] settings) throws Exception {
        PrintStream told = System.out;
        System.setOut(System.err); // what is logged
        Map<String, String> properties =
                Arrays.stream(settings)
                        .map(setting -> setting.split("=", 2))
                        .collect(Collectors.toMap(pair -> pair[0], pair -> pair[1]));
        Catalog catalog =
                CatalogUtil.buildIcebergCatalog("reference", properties, new Configuration());
        ServletContextHandler routes = new ServletContextHandler();
        RESTCatalogServlet servlet = new RESTCatalogServlet(new RESTCatalogAdapter(catalog));
        routes.addServlet(new ServletHolder(servlet), "/*");
        Server server = new Server(new InetSocketAddress("127.0.0.1", 0));
        server.setHandler(routes);
        server.start();
        told.println("http://127.0.0.1:" + server.getURI().getPort());
        while (System.in.read() >= 0) {}
        System.exit(0);
    }
}
