/* The one module in C, mqmesh._native; each type has a file of its own. */

#include "slots.h"

int
mq_find_slot(PyTypeObject *type, const char *name, Py_ssize_t *place)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (found == NULL)
        return -1;
    int is_slot = Py_IS_TYPE(found, &PyMemberDescr_Type);
    if (is_slot) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        is_slot = member->type == T_OBJECT_EX && PyType_IsSubtype(type, PyDescr_TYPE(found));
        *place = member->offset;
    }
    Py_DECREF(found);
    if (!is_slot) {
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
        return -1;
    }
    return 0;
}

int
mq_find_message_slots(PyTypeObject *message, MessageSlots *slots)
{
    int failed = mq_find_slot(message, "topic", &slots->topic)
        || mq_find_slot(message, "body", &slots->body)
        || mq_find_slot(message, "tag", &slots->tag)
        || mq_find_slot(message, "keys", &slots->keys)
        || mq_find_slot(message, "properties", &slots->properties)
        || mq_find_slot(message, "flag", &slots->flag)
        || mq_find_slot(message, "sharding_key", &slots->sharding_key)
        || mq_find_slot(message, "delay_level", &slots->delay_level)
        || mq_find_slot(message, "deliver_at_ms", &slots->deliver_at_ms);
    return failed ? -1 : 0;
}

static int
module_exec(PyObject *module)
{
    PyType_Spec *specs[] = {
        &mq_encoder_spec, &mq_decoder_spec, &mq_field_spec, &mq_property_spec, &mq_checker_spec,
        &mq_open_batch_spec, &mq_admission_spec
    };
    for (size_t number = 0; number < Py_ARRAY_LENGTH(specs); number++) {
        PyObject *type = PyType_FromSpec(specs[number]);
        if (type == NULL)
            return -1;
        int failed = PyModule_AddType(module, (PyTypeObject *)type);
        Py_DECREF(type);
        if (failed)
            return -1;
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mqmesh._native",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
