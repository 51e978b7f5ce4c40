/* A client made of nothing but libzmq and docs/protocol.md: asks a name server for the route of a topic.
 *
 * usage: curve_client ENDPOINT TOPIC [SERVER_KEY PUBLIC_KEY SECRET_KEY]      keys: 40 characters of Z85
 *
 * Prints "code N, M bytes" for an answer (exit 0), "refused EVENT" if ZeroMQ tells that the handshake
 * failed (exit 3), "nothing" if neither comes (exit 4).
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

enum { PREFIX = 16, GET_ROUTEINFO_BY_TOPIC = 105, OPAQUE = 7, PATIENCE_MS = 5000 };
enum { REFUSED = ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL
               | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH };

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, zmq_strerror(zmq_errno()));
    return 1;
}

static void put(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;)
        value = value << 8 | at[i];
    return value;
}

static size_t route_request(uint8_t *frame, const char *topic)
{
    size_t size = strlen(topic);
    put(frame, 1, 1);                           /* protocol version */
    put(frame + 1, 0, 1);                       /* flags */
    put(frame + 2, GET_ROUTEINFO_BY_TOPIC, 2);
    put(frame + 4, 2 + size, 4);                /* header_size */
    put(frame + 8, OPAQUE, 8);
    frame[PREFIX] = 0x91;                       /* an array of one */
    frame[PREFIX + 1] = (uint8_t)(0xa0 | size); /* text of up to 31 bytes */
    memcpy(frame + PREFIX + 2, topic, size);
    return PREFIX + 2 + size;
}

static int told(void *socket, void *monitor)
{
    zmq_pollitem_t items[] = {{socket, 0, ZMQ_POLLIN, 0}, {monitor, 0, ZMQ_POLLIN, 0}};
    uint8_t answer[4096], event[6], where[256];
    if (zmq_poll(items, 2, PATIENCE_MS) <= 0) {
        puts("nothing");
        return 4;
    }
    if (!(items[0].revents & ZMQ_POLLIN)) {
        if (zmq_recv(monitor, event, sizeof event, 0) != sizeof event
            || zmq_recv(monitor, where, sizeof where, 0) < 0)
            return failed("monitor");
        printf("refused %u\n", (unsigned)get(event, 2));
        return 3;
    }
    int size = zmq_recv(socket, answer, sizeof answer, 0);
    if (size < PREFIX || size > (int)sizeof answer || answer[0] != 1 || answer[1] != 1
        || get(answer + 8, 8) != OPAQUE)
        return failed("that is no answer");
    printf("code %u, %u bytes\n", (unsigned)get(answer + 2, 2), (unsigned)get(answer + 4, 4));
    return 0;
}

int main(int count, char **words)
{
    if ((count != 3 && count != 6) || strlen(words[2]) > 31)
        return 2;
    void *context = zmq_ctx_new();
    void *socket = zmq_socket(context, ZMQ_DEALER), *monitor = zmq_socket(context, ZMQ_PAIR);
    int none = 0;
    zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none);
    if (count == 6 && (zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, words[3], 41)
                       || zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, words[4], 41)
                       || zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, words[5], 41)))
        return failed("keys");
    if (zmq_socket_monitor(socket, "inproc://monitor", REFUSED) || zmq_connect(monitor, "inproc://monitor")
        || zmq_connect(socket, words[1]))
        return failed("connect");
    uint8_t frame[PREFIX + 64];
    size_t size = route_request(frame, words[2]);
    if (zmq_send(socket, frame, size, 0) != (int)size)
        return failed("send");
    int code = told(socket, monitor);
    zmq_close(socket);
    zmq_close(monitor);
    zmq_ctx_term(context);
    return code;
}
