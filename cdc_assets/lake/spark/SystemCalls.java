import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** Local files whose mode a system call sets. Without a native library, Hadoop runs chmod for each. */
public class SystemCalls extends RawLocalFileSystem {
    public void setPermission(Path path, FsPermission mode) throws IOException {
        if (mode.getStickyBit()) {  // nothing of Java's own sets it
            super.setPermission(path, mode);
            return;
        }
        String letters = mode.toString();
        Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(letters));
    }
}
