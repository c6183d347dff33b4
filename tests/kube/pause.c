/* The first process of a pod: waits, reaps, ends on TERM. */
#include <signal.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal) { (void)signal; _exit(0); }

int main(void) {
    signal(SIGTERM, end);
    signal(SIGINT, end);
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        sleep(1);
    }
}
