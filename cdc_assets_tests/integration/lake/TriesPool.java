import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;

/** What Iceberg relies on, of its tasks and their pool; prints what is so. */
public class TriesPool {
    public static void main(String[] none) throws Exception {
        PromptPool pool = new PromptPool((ThreadPoolExecutor) Executors.newFixedThreadPool(4));
        CountDownLatch held = new CountDownLatch(1);
        Future<?> quick = pool.submit(() -> pause(20));
        said("a task that is nearly done is waited for", quick.isDone());
        while (pool.getActiveCount() > 0) {
            pause(1);
        }
        AtomicBoolean ran = new AtomicBoolean();
        pool.execute(() -> ran.set(true));
        said("what nobody can ask has a moment", ran.get());
        pool.execute(() -> await(held));
        said("and no more than that", held.getCount() == 1);
        CountDownLatch begun = new CountDownLatch(100);
        long before = System.nanoTime();
        for (int i = 0; i < 100; i++) {
            pool.execute(() -> begun.countDown());
        }
        long millis = (System.nanoTime() - before) / 1_000_000;
        begun.await();
        said("and none beside others: " + millis + " ms", millis < 250);
        Future<?> slow = pool.submit(() -> await(held));
        said("one that goes on isn't done", !slow.isDone());
        Thread.currentThread().interrupt();
        boolean done = slow.isDone();
        said("an interruption ends the wait, and is kept", !done && Thread.interrupted());
        Thread.currentThread().interrupt();
        pool.execute(() -> await(held));
        said("so it is where a task is begun", Thread.interrupted());
        held.countDown();
        slow.get();
        said("it is done in the end", slow.isDone());
        Future<?> failing = pool.submit(() -> { throw new IllegalStateException("x"); });
        said("one that failed is done", failing.isDone());
        try {
            failing.get();
        } catch (ExecutionException error) {
            said("and tells its error", "x".equals(error.getCause().getMessage()));
        }
        Future<?> cancelled = pool.submit(() -> pause(10_000));
        cancelled.cancel(true);
        said("one that was cancelled is done", cancelled.isDone() && cancelled.isCancelled());
        CyclicBarrier together = new CyclicBarrier(4);
        List<Future<Integer>> four = new ArrayList<>();
        for (int i = 0; i < 4; i++) {
            four.add(pool.submit(() -> together.await(20, TimeUnit.SECONDS)));
        }
        for (Future<Integer> each : four) {
            each.get();
        }
        said("four run side by side", true);
        for (int i = 0; i < 100 && pool.getPoolSize() > 0; i++) {
            pause(100);
        }
        said("idle threads end", pool.getPoolSize() == 0);
    }

    private static void said(String what, boolean so) {
        System.out.println((so ? "yes: " : "no: ") + what);
    }

    private static void pause(long millis) {
        try {
            Thread.sleep(millis);
        } catch (InterruptedException ended) {
            Thread.currentThread().interrupt();
        }
    }

    private static void await(CountDownLatch latch) {
        try {
            latch.await();
        } catch (InterruptedException ended) {
            Thread.currentThread().interrupt();
        }
    }
}
