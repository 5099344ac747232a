import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.RunnableFuture;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * A pool whose results are seen when they are there.
 *
 * Iceberg asks its tasks in turn whether they are done, and sleeps for 10 ms if one isn't: a dozen
 * times a commit, for tasks of half a millisecond. Those of this pool say so once they are done, or
 * after a while. And where nothing else is at work, a task that nobody can ask has a moment to be done.
 */
public class PromptPool extends ThreadPoolExecutor {
    private static final long WHILE_MILLIS = 100, MOMENT_MILLIS = 5, IDLE_SECONDS = 2;

    /** As large as another. An idle thread ends soon: it keeps the Spark session it was made under. */
    public PromptPool(ThreadPoolExecutor like) {
        super(like.getCorePoolSize(), like.getCorePoolSize(), IDLE_SECONDS, TimeUnit.SECONDS,
              new LinkedBlockingQueue(), like.getThreadFactory());
        allowCoreThreadTimeOut(true);
    }

    protected RunnableFuture newTaskFor(Callable task) {
        return new Task(task);
    }

    protected RunnableFuture newTaskFor(Runnable task, Object result) {
        return new Task(task, result);
    }

    public void execute(Runnable task) {
        boolean alone = getActiveCount() == 0 && getQueue().isEmpty();
        if (task instanceof Task || !alone) {  // of many, each would wait for the one before
            super.execute(task);
            return;
        }
        Noted noted = new Noted(task);
        super.execute(noted);
        try {
            noted.done.await(MOMENT_MILLIS, TimeUnit.MILLISECONDS);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    private static class Task extends FutureTask {
        Task(Callable task) {
            super(task);
        }

        Task(Runnable task, Object result) {
            super(task, result);
        }

        public boolean isDone() {
            if (!super.isDone()) {
                try {
                    get(WHILE_MILLIS, TimeUnit.MILLISECONDS);
                } catch (InterruptedException interrupted) {
                    Thread.currentThread().interrupt();
                } catch (TimeoutException later) {
                    return false;
                } catch (ExecutionException failed) {
                    return true;
                } catch (CancellationException cancelled) {
                    return true;
                }
            }
            return super.isDone();
        }
    }

    private static class Noted implements Runnable {
        final CountDownLatch done = new CountDownLatch(1);
        private final Runnable task;

        Noted(Runnable task) {
            this.task = task;
        }

        public void run() {
            try {
                task.run();
            } finally {
                done.countDown();
            }
        }
    }
}
