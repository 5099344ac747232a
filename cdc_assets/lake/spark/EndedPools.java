import java.lang.reflect.Field;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.ExecutorService;

/**
 * Forgets pools that have ended.
 *
 * Iceberg has a pool for each compaction, and a hook that would end it with the JVM. The pool ends
 * with its compaction, but its hook stays, and keeps the Spark session that it was made under.
 */
public class EndedPools extends Thread {
    private static final String HOOK = "DelayedShutdownHook-for-";
    private static final long EVERY_MILLIS = 10000;

    private final Class all;
    private final Field hooks;

    public EndedPools() throws ReflectiveOperationException {
        super(null, null, "ended-pools", 0, false);
        setDaemon(true);
        all = Class.forName("java.lang.ApplicationShutdownHooks");
        hooks = all.getDeclaredField("hooks");
        hooks.setAccessible(true);
        forget();  // what it can't do, it says now
    }

    public void run() {
        try {
            while (true) {
                Thread.sleep(EVERY_MILLIS);
                forget();
            }
        } catch (InterruptedException ended) {
            return;
        } catch (ReflectiveOperationException other) {  // than what was there at the start
            throw new IllegalStateException(other);
        }
    }

    private void forget() throws ReflectiveOperationException {
        synchronized (all) {  // whoever adds or removes a hook has this lock
            Map present = (Map) hooks.get(null);
            if (present == null) {  // the JVM ends
                return;
            }
            for (Iterator each = present.keySet().iterator(); each.hasNext();) {
                Thread hook = (Thread) each.next();
                if (hook.getName().startsWith(HOOK) && hasEnded(task(hook))) {
                    each.remove();
                }
            }
        }
    }

    private static Object task(Thread hook) throws ReflectiveOperationException {
        try {
            return value(Thread.class, "target", hook);
        } catch (NoSuchFieldException later) {  // Java 19 and later
            Object holder = value(Thread.class, "holder", hook);
            return value(holder.getClass(), "task", holder);
        }
    }

    private static Object value(Class of, String name, Object object) throws ReflectiveOperationException {
        Field field = of.getDeclaredField(name);
        field.setAccessible(true);
        return field.get(object);
    }

    private static boolean hasEnded(Object task) throws ReflectiveOperationException {
        Field[] fields = task.getClass().getDeclaredFields();
        for (int i = 0; i < fields.length; i++) {
            if (ExecutorService.class.isAssignableFrom(fields[i].getType())) {
                fields[i].setAccessible(true);
                return ((ExecutorService) fields[i].get(task)).isTerminated();
            }
        }
        return false;
    }
}
