/* What decode.c and fields.c know of messages that were decoded. */

#ifndef MQMESH_DECODE_H
#define MQMESH_DECODE_H

#include "reading.h"

/* Of what messages of a batch share. */
typedef struct {
    Py_ssize_t producer_id, first_sequence, base_queue_offset;
} InfoSlots;

#define SHARED_NAMES 64
#define SHARED_NAME_BYTES 64

typedef struct {
    PyObject_HEAD
    PyTypeObject *message_type, *batch_type;
    PyObject *no_keys, *zero;
    PyObject *names[SHARED_NAMES]; /* of properties made last, each at a place that its text has */
    MessageSlots message;
    InfoSlots info;
    Py_ssize_t queue_offset, batch, max_strings;
    FieldLimits limits;
} Decoder;

/* A text of 1 to so many characters; NULL, without an error unless memory is short, for none. */
static inline PyObject *
make_limited(Reading *reading, Py_ssize_t max_characters)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    if (text == NULL || length < 1)
        return NULL;
    PyObject *made = make_text(text, length);
    if (made != NULL && PyUnicode_GET_LENGTH(made) > max_characters)
        Py_CLEAR(made);
    return made;
}

#endif
