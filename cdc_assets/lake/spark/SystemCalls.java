import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** Local files whose mode a system call sets. Without a native library, Hadoop runs chmod for each. */
public class SystemCalls extends RawLocalFileSystem {
    private static final String MODE = "unix:mode";
    private static final LinkOption[] FOLLOWED = {};
    // A folder's files may take its group: chmod leaves that as it is, for folders.
    private static final int SET_IDS = 06000;

    public void setPermission(Path path, FsPermission mode) throws IOException {
        File file = pathToFile(path);
        int wanted = mode.toShort() & 01777;
        if (file.isDirectory()) {
            wanted |= ((Integer) Files.getAttribute(file.toPath(), MODE, FOLLOWED)).intValue() & SET_IDS;
        }
        Files.setAttribute(file.toPath(), MODE, Integer.valueOf(wanted), FOLLOWED);
    }
}
