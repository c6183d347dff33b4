/* A stand-in for vLLM's chat endpoint on 127.0.0.1: one thread, epoll, tens of thousands of answers per second.
 *
 * usage: proxy_upstream PORT THINK_MS RESPONSE_JSON...
 *
 * A POST whose body contains TURN-a gets the first file, TURN-b the second one and so on, after THINK_MS. GET /count
 * answers the number of POSTs so far, every other GET {"status":"ok"}.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 8192
#define MAX_TURNS 26

typedef struct {
    int fd, waiting, writing, turn;
    char *in;
    size_t in_len, in_cap;
    char *out;
    size_t out_len, out_pos, out_cap;
    double due; /* when the answer leaves, while waiting */
} Conn;

static Conn *conns[MAX_FD];
static int waiting[MAX_FD], n_waiting;
static int poller, think_ms;
static long posts;
static char *responses[MAX_TURNS];
static size_t lengths[MAX_TURNS];
static int n_responses;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void load(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) { perror(path); exit(1); }
    fseek(f, 0, SEEK_END);
    size_t n = ftell(f);
    rewind(f);
    char *out = malloc(n + 256);
    size_t head = sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", n);
    if (fread(out + head, 1, n, f) != n) { perror(path); exit(1); }
    fclose(f);
    responses[n_responses] = out;
    lengths[n_responses++] = head + n;
}

static void want_writing(Conn *c, int on) {
    if (c->writing == on) return;
    c->writing = on;
    struct epoll_event e = {.events = EPOLLIN | (on ? EPOLLOUT : 0), .data.fd = c->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

static void stop_waiting(Conn *c) {
    for (int i = 0; i < n_waiting; i++)
        if (waiting[i] == c->fd) { waiting[i] = waiting[--n_waiting]; break; }
    c->waiting = 0;
}

static void drop(Conn *c) {
    if (c->waiting) stop_waiting(c);
    conns[c->fd] = NULL;
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static void flush_out(Conn *c) {
    while (c->out_pos < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_pos, c->out_len - c->out_pos, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) want_writing(c, 1);
            else drop(c);
            return;
        }
        c->out_pos += n;
    }
    want_writing(c, 0);
    c->out_len = c->out_pos = 0;
}

static void put(Conn *c, const char *data, size_t n) {
    if (n > c->out_cap) c->out = realloc(c->out, c->out_cap = n);
    memcpy(c->out, data, n);
    c->out_len = n;
    c->out_pos = 0;
    flush_out(c);
}

static void answer(Conn *c) { put(c, responses[c->turn], lengths[c->turn]); }

/* One request at a time per connection, as HTTP clients do. */
static void parse(Conn *c) {
    if (c->waiting || c->out_len) return;
    char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end - c->in + 4, length = 0;
    for (char *line = c->in; line < end;) {
        char *eol = memmem(line, end + 2 - line, "\r\n", 2);
        if (!strncasecmp(line, "content-length:", 15)) length = strtoul(line + 15, NULL, 10);
        line = eol + 2;
    }
    if (c->in_len < head + length) return;
    int post = !strncmp(c->in, "POST", 4), count = !strncmp(c->in, "GET /count", 10);
    char *mark = memmem(c->in + head, length, "TURN-", 5);
    c->turn = mark && mark[5] >= 'a' && mark[5] < 'a' + n_responses ? mark[5] - 'a' : 0;
    memmove(c->in, c->in + head + length, c->in_len - head - length);
    c->in_len -= head + length;
    if (!post) {
        char body[64], out[256];
        int n = count ? sprintf(body, "%ld", posts) : sprintf(body, "{\"status\":\"ok\"}");
        int m = sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", n, body);
        put(c, out, m);
        return;
    }
    posts++;
    if (!think_ms) { answer(c); return; }
    c->waiting = 1;
    c->due = now_ms() + think_ms;
    waiting[n_waiting++] = c->fd;
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK), one = 1;
        if (fd < 0) return;
        if (fd >= MAX_FD) { close(fd); continue; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->in = malloc(c->in_cap = 65536);
        conns[fd] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}

static void read_all(Conn *c) {
    for (;;) {
        if (c->in_cap - c->in_len < 32768) c->in = realloc(c->in, c->in_cap *= 2);
        ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len, 0);
        if (n > 0) { c->in_len += n; continue; }
        if (n == 0 || errno != EAGAIN) { drop(c); return; }
        break;
    }
    parse(c);
}

int main(int argc, char **argv) {
    if (argc < 4 || argc > 3 + MAX_TURNS) {
        fprintf(stderr, "usage: %s PORT THINK_MS RESPONSE_JSON...\n", argv[0]);
        return 2;
    }
    think_ms = atoi(argv[2]);
    for (int i = 3; i < argc; i++) load(argv[i]);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 2048)) { perror("listen"); return 1; }
    poller = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, events[512];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);

    for (;;) {
        int n = epoll_wait(poller, events, 512, n_waiting ? 1 : 1000);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) { accept_all(listener); continue; }
            if (conns[fd] && events[i].events & EPOLLOUT) flush_out(conns[fd]);
            if (conns[fd] && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_all(conns[fd]);
        }
        double t = n_waiting ? now_ms() : 0;
        for (int i = n_waiting - 1; i >= 0; i--) {
            Conn *c = conns[waiting[i]];
            if (c->due > t) continue;
            stop_waiting(c);
            answer(c);
        }
    }
}
