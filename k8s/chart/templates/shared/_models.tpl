{{/* Volumes of models and of what is downloaded from the hub, and the claims that the chart creates for them. */}}

{{/* (dict "root" $ "service" "verifier" "name" "models" "volume" map "claim" map): a volume of a pod, or nothing. */}}
{{- define "draftwire.volume" -}}
{{- if not .claim.size }}
{{- with .volume }}
- name: {{ $.name }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- else if not .claim.perPod }}
- name: {{ .name }}
  persistentVolumeClaim: {claimName: {{ include "draftwire.claimName" . }}}
{{- else if and (include "draftwire.usesClaim" .) (not (include "draftwire.isStateful" .)) }}
- name: {{ .name }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "draftwire.claimSpec" .claim | nindent 8 }}
{{- end }}
{{- end }}

{{/* (dict "root" $ "service" "verifier" "name" "models" "claim" map): whether a service's pods get a volume. A claim of
each pod's own is only for those whose model is there. */}}
{{- define "draftwire.usesClaim" -}}
{{- $isFolder := hasPrefix "/" (index .root.Values .service).model -}}
{{- if or (not .claim.perPod) (eq (eq .name "models") $isFolder) }}true{{ end -}}
{{- end }}

{{/* Whether a service's pods keep their volumes: a StatefulSet gives them claims by its templates. */}}
{{- define "draftwire.isStateful" -}}
{{- if and (eq .service "verifier") (eq (int .root.Values.verifier.tensorParallel.nodes) 1) }}true{{ end -}}
{{- end }}

{{/* One for all targets of the release. */}}
{{- define "draftwire.claimName" -}}
{{ include "draftwire.releaseName" .root }}-{{ .name }}
{{- end }}

{{- define "draftwire.claimSpec" -}}
accessModes: {{ .accessModes | default (list (.perPod | ternary "ReadWriteOnce" "ReadWriteMany")) | toJson }}
{{- if not (kindIs "invalid" .storageClassName) }}
storageClassName: {{ .storageClassName | quote }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* Of the verifiers' StatefulSet. */}}
{{- define "draftwire.claimTemplates" -}}
{{- range $name, $claim := dict "models" .Values.models.claim "hub" .Values.models.hub.claim }}
{{- if and $claim.size $claim.perPod (include "draftwire.usesClaim" (dict "root" $ "service" "verifier" "name" $name "claim" $claim)) }}
- metadata: {name: {{ $name }}}
  spec:
    {{- include "draftwire.claimSpec" $claim | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}
